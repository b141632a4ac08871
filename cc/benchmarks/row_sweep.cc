// Measures lookups and updates of one table for a given prefetch distance and
// tile size. The results determine the values in cc/core/simd/row_tuning.cc.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/views.h"
#include "cc/core/memory/huge_pages.h"
#include "cc/core/optimizers/apply.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/rows/unique_rows.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/simd/row_tuning.h"
#include "cc/core/tables/half_table.h"
#include "cc/core/tables/lookup.h"
#include "cc/core/tables/sharded_view.h"

namespace py = pybind11;

namespace {

using layoutmap::ParallelFor;
using layoutmap::RowTuning;
using layoutmap::RowType;
using layoutmap::Span;

// Returns a parallel loop that starts new threads and distributes its blocks
// over them.
ParallelFor ThreadsFor(int num_threads) {
  return [num_threads](int64_t total, int64_t,
                       const std::function<void(int64_t, int64_t)>& work) {
    const int64_t num_blocks = std::min<int64_t>(total, 8 * num_threads);
    std::atomic<int64_t> next{0};
    const auto take_blocks = [&] {
      for (int64_t b = next++; b < num_blocks; b = next++) {
        work(total * b / num_blocks, total * (b + 1) / num_blocks);
      }
    };
    std::vector<std::thread> threads;
    for (int t = 0; t < num_threads; ++t) threads.emplace_back(take_blocks);
    for (std::thread& thread : threads) thread.join();
  };
}

double Milliseconds(const std::function<void()>& work) {
  const auto started = std::chrono::steady_clock::now();
  work();
  const std::chrono::duration<double, std::milli> took =
      std::chrono::steady_clock::now() - started;
  return took.count();
}

template <typename T>
std::vector<T> LargePages(int64_t size, T value) {
  std::vector<T> made;
  made.reserve(size);
  layoutmap::AdviseHugePages(made.data(), size * sizeof(T));
  made.assign(size, value);
  return made;
}

// A table with its accumulators, and a batch of ids that are uniformly
// distributed.
class Sweep {
 public:
  Sweep(int64_t num_rows, int64_t dim, bool half, int64_t num_samples,
        int64_t ids_per_sample, int num_threads)
      : half_(half),
        kernels_(layoutmap::RowKernelsFor(layoutmap::CurrentCpuLevel())),
        parallel_for_(ThreadsFor(num_threads)),
        rows_(LargePages<float>(half ? 0 : num_rows * dim, 0.5f)),
        half_rows_(LargePages<uint16_t>(half ? num_rows * dim : 0, 0x3f00)),
        slots_(LargePages<float>(num_rows * dim, 1.0f)),
        values_(LargePages<float>(num_samples * dim, 1e-3f)),
        ids_(num_samples * ids_per_sample),
        splits_(num_samples + 1) {
    const std::vector<int64_t> offsets = {0, num_rows};
    if (!layoutmap::RowPartition::Make(layoutmap::Placement::kDiv, offsets,
                                       &partition_)
             .ok()) {
      throw py::value_error("`num_rows` must be at least 0");
    }
    view_ = {&partition_, {rows_.data()}, dim};
    half_view_ = {&partition_, {half_rows_.data()}, dim};
    slot_view_ = {&partition_, {slots_.data()}, dim};
    std::mt19937_64 random(7);
    for (uint32_t& id : ids_) id = random() % num_rows;
    for (int64_t s = 0; s <= num_samples; ++s) splits_[s] = s * ids_per_sample;
    for (int64_t s = 0; s < num_samples; ++s) {
      samples_.insert(samples_.end(), ids_per_sample, s);
      gradient_rows_.push_back(values_.data() + s * dim);
    }
    const Span<const uint32_t> segment = ids_;
    unique_ = layoutmap::FindUniqueRows({&segment, 1}, num_rows,
                                        layoutmap::SerialFor, samples_);
  }

  double Lookup(int64_t ahead, int64_t tile) {
    const layoutmap::ShardedView<const float> table = {
        &partition_, {rows_.data()}, view_.dim};
    const layoutmap::ShardedView<const uint16_t> half_table = {
        &partition_, {half_rows_.data()}, view_.dim};
    layoutmap::LookupTask task;
    if (half_) {
      task.half_table = &half_table;
    } else {
      task.table = &table;
    }
    task.row_type = half_ ? RowType::kBfloat16 : RowType::kFloat32;
    task.rows = ids_;
    task.splits = splits_;
    task.out = {values_.data(), static_cast<int64_t>(splits_.size()) - 1,
                view_.dim};
    task.tuning = {ahead, 0, tile};
    return Milliseconds(
        [&] { layoutmap::LookupAll({task}, kernels_, parallel_for_); });
  }

  // Applies Adagrad to the distinct rows of the batch. Returns the duration in
  // milliseconds.
  double Update(int64_t ahead, int64_t gradients_ahead, int64_t tile) {
    const std::vector<float> hyperparameters = {1e-3f};
    layoutmap::HalfTable half_table;
    half_table.rows = half_view_;
    const std::vector<layoutmap::ShardedView<float>> slots = {slot_view_};
    layoutmap::TableUpdate update;
    update.optimizer = layoutmap::Optimizer::kAdagrad;
    update.hyperparameters = hyperparameters;
    update.gradients.rows = unique_.rows;
    update.gradients.splits = unique_.splits;
    update.gradients.gradient_of = unique_.positions;
    update.gradients.gradient_rows = gradient_rows_;
    update.table = half_ ? nullptr : &view_;
    update.half_table = half_ ? &half_table : nullptr;
    update.slots = slots;
    update.tuning = {ahead, gradients_ahead, tile};
    return Milliseconds([&] {
      layoutmap::ApplyGradientsToAll({update}, kernels_, parallel_for_);
    });
  }

  // Groups the ids by row to prepare an update. Returns the duration in
  // milliseconds.
  double Sort() {
    const Span<const uint32_t> segment = ids_;
    return Milliseconds([&] {
      layoutmap::FindUniqueRows({&segment, 1}, partition_.num_rows(),
                                parallel_for_, samples_);
    });
  }

 private:
  const bool half_;
  const layoutmap::RowKernels& kernels_;
  const ParallelFor parallel_for_;
  std::vector<float> rows_;
  std::vector<uint16_t> half_rows_;
  std::vector<float> slots_, values_;
  std::vector<uint32_t> ids_, samples_;
  std::vector<int64_t> splits_;
  layoutmap::RowPartition partition_;
  layoutmap::ShardedView<float> view_, slot_view_;
  layoutmap::ShardedView<uint16_t> half_view_;
  std::vector<const float*> gradient_rows_;
  layoutmap::UniqueRows unique_;
};

}  // namespace

PYBIND11_MODULE(_row_sweep, m) {
  m.doc() = "Measures lookups and updates with any prefetch distance and tile.";
  const auto release = py::call_guard<py::gil_scoped_release>();
  py::class_<Sweep>(m, "Sweep")
      .def(py::init<int64_t, int64_t, bool, int64_t, int64_t, int>(),
           py::arg("num_rows"), py::arg("dim"), py::arg("half"),
           py::arg("num_samples"), py::arg("ids_per_sample"),
           py::arg("num_threads"))
      .def("lookup", &Sweep::Lookup, py::arg("ahead"), py::arg("tile"), release)
      .def("update", &Sweep::Update, py::arg("ahead"),
           py::arg("gradients_ahead"), py::arg("tile"), release)
      .def("sort", &Sweep::Sort, release);
}
