// Python module with functions of the core that accept numpy arrays. Tests use
// it, and programs use it to plan shardings without TensorFlow.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/check_ids.h"
#include "cc/core/rows/route.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/rows/unique_rows.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/dtensor/expander_registry.h"
#include "cc/python/answer_watch.h"
#include "cc/python/vocabulary.h"

namespace py = pybind11;

namespace layoutmap {
namespace {

// If `status` is an error, raises ValueError with the message of the core.
void Check(const Status& status) {
  if (!status.ok()) throw py::value_error(status.message());
}

// If `status` is an error, raises RuntimeError with the message of the core.
// Used for failed preconditions.
void CheckCall(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

template <typename T>
Span<const T> View(const Array<T>& array, const char* name) {
  if (array.ndim() != 1) {
    throw py::value_error(std::string("`") + name +
                          "` must have rank 1. Received: rank " +
                          std::to_string(array.ndim()));
  }
  return {array.data(), static_cast<int64_t>(array.size())};
}

template <typename T, typename U>
Array<T> ToArray(const std::vector<U>& values) {
  Array<T> array(static_cast<py::ssize_t>(values.size()));
  std::copy(values.begin(), values.end(), array.mutable_data());
  return array;
}

RowPartition MakePartition(const Array<int64_t>& offsets,
                           const std::string& placement) {
  Placement parsed;
  RowPartition partition;
  Check(ParsePlacement(placement, &parsed));
  Check(RowPartition::Make(parsed, View(offsets, "offsets"), &partition));
  return partition;
}

template <typename Tid>
py::tuple AssignPartitionPy(const Array<Tid>& ids,
                            const Array<int64_t>& offsets,
                            const std::string& placement) {
  const RowPartition partition = MakePartition(offsets, placement);
  std::vector<int32_t> shards(ids.size());
  std::vector<Tid> local_rows(ids.size());
  Check(AssignPartition<Tid>(partition, View(ids, "ids"), shards, local_rows));
  return py::make_tuple(ToArray<int32_t>(shards), ToArray<Tid>(local_rows));
}

template <typename Tid>
py::tuple RouteIdsPy(const Array<Tid>& ids, const Array<int64_t>& offsets,
                     const std::string& placement, bool unique) {
  const RowPartition partition = MakePartition(offsets, placement);
  Route<Tid> route;
  Check(RouteIds<Tid>(partition, View(ids, "ids"), unique, &route));
  return py::make_tuple(
      ToArray<Tid>(route.local_rows), ToArray<int64_t>(route.splits),
      ToArray<int32_t>(route.permutation), ToArray<int32_t>(route.inverse));
}

template <typename Tid>
py::tuple FindUniqueRowsPy(const Array<Tid>& ids, int64_t num_rows) {
  // The call checks the number of rows. The partition has only one shard and is
  // not used.
  const std::vector<int64_t> offsets = {0, num_rows};
  RowPartition partition;
  Check(RowPartition::Make(Placement::kDiv, offsets, &partition));
  const Span<const Tid> checked = View(ids, "ids");
  Check(CheckIds(checked, num_rows));
  const std::vector<uint32_t> rows(checked.begin(), checked.end());
  const Span<const uint32_t> segment(rows);
  const UniqueRows unique =
      FindUniqueRows(Span<const Span<const uint32_t>>(&segment, 1), num_rows);
  return py::make_tuple(ToArray<Tid>(unique.rows),
                        ToArray<int64_t>(unique.splits),
                        ToArray<int32_t>(unique.positions));
}

template <typename Tid>
void DefineForIds(py::module_* m) {
  // The argument is `noconvert`, so that ids of another dtype raise TypeError
  // instead of being converted.
  m->def("assign_partition", &AssignPartitionPy<Tid>,
         py::arg("ids").noconvert(), py::arg("offsets"), py::arg("placement"),
         "Returns (shards, local_rows) of the global rows `ids`.");
  m->def(
      "route_ids", &RouteIdsPy<Tid>, py::arg("ids").noconvert(),
      py::arg("offsets"), py::arg("placement"), py::arg("unique") = false,
      "Returns (local_rows, splits, permutation, inverse) of `ids` by shard.");
  m->def("find_unique_rows", &FindUniqueRowsPy<Tid>, py::arg("ids").noconvert(),
         py::arg("num_rows"),
         "Returns (rows, splits, positions): the distinct ids and their "
         "positions.");
}

}  // namespace
}  // namespace layoutmap

PYBIND11_MODULE(_native, m) {
  m.doc() = "The core of tf_layoutmap on numpy arrays.";
  layoutmap::DefineForIds<int32_t>(&m);
  layoutmap::DefineForIds<int64_t>(&m);
  layoutmap::DefineVocabulary(&m);
  layoutmap::DefineAnswerWatch(&m);
  m.def(
      "cpu_level",
      [] { return layoutmap::CpuLevelName(layoutmap::CurrentCpuLevel()); },
      "Returns the instruction set in use: baseline, avx2 or avx512.");
  m.def(
      "share_expander",
      [](const std::string& name, const std::string& donor) {
        layoutmap::CheckCall(layoutmap::ShareExpander(name, donor));
      },
      py::arg("name"), py::arg("donor"),
      "Registers the tf.dtensor expander of the stock op `donor` for op "
      "`name`.");
  m.def("has_expander", &layoutmap::HasExpander, py::arg("name"),
        "Returns whether op `name` has an expander in tf.dtensor.");
  m.def(
      "expander_registry_problem",
      [] { return layoutmap::ExpanderRegistryAvailable().message(); },
      "Returns why `share_expander` does not work, or an empty string.");
}
