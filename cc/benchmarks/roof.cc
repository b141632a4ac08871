// Measures how fast this machine can read and update random rows. The loops are
// plain C++ with prefetches and are compiled for this processor. The memory is
// in huge pages and is written once before the measurement.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/check_ids.h"
#include "cc/core/memory/huge_pages.h"

namespace py = pybind11;

namespace {

// Prefetch distances in rows. With 16 rows, a lookup of narrow rows took up to
// 1.6 times as long as with 40 rows. The kernels of the package use 40 rows,
// too.
constexpr int64_t kLookupAhead = 40;
constexpr int64_t kAhead = 16;
// Cache level into which rows are prefetched. The kernels of the package use
// the same level.
constexpr int kSecondLevel = 2;

// Number of floats in a cache line. Rows of 8 floats use half of a line.
constexpr int kLine = 16;
constexpr int kHalfLine = 8;

using Ints = py::array_t<int64_t, py::array::c_style>;
using layoutmap::Span;

Span<const int64_t> View(const Ints& values) {
  return {values.data(), static_cast<int64_t>(values.size())};
}

void Check(const layoutmap::Status& status) {
  if (!status.ok()) throw py::value_error(status.message());
}

// Sums table rows that are `kVectors` vectors wide. The sums stay in registers
// if there are enough registers.
template <int kVectors, int kFloats = kLine>
void LookupRange(const int64_t* ids, const int64_t* splits, int64_t begin,
                 int64_t end, const float* table, float* out) {
  // This type is defined here, because a template argument loses the alignment.
  typedef float Vector
      __attribute__((vector_size(kFloats * 4), aligned(4), may_alias));
  constexpr int64_t kDim = kVectors * kFloats;
  const int64_t last = splits[end] - 1;
  for (int64_t s = begin; s < end; ++s) {
    Vector sums[kVectors] = {};
    for (int64_t i = splits[s]; i < splits[s + 1]; ++i) {
      const float* ahead = table + ids[std::min(i + kLookupAhead, last)] * kDim;
      const float* row = table + ids[i] * kDim;
      for (int c = 0; c < kVectors; ++c) {
        __builtin_prefetch(ahead + c * kFloats, 0, kSecondLevel);
        sums[c] += *reinterpret_cast<const Vector*>(row + c * kFloats);
      }
    }
    for (int c = 0; c < kVectors; ++c) {
      float* to = out + s * kDim + c * kFloats;
      *reinterpret_cast<Vector*>(to) = sums[c];
    }
  }
}

// Arguments of the update of one table: the distinct rows in ascending order,
// and the gradients of each row. The gradients of rows[i] have the indices
// gradient_of[splits[i]] to gradient_of[splits[i + 1] - 1].
struct Groups {
  const int64_t* rows;
  const int64_t* splits;
  const int64_t* gradient_of;
};

template <int kVectors, int kFloats = kLine>
void UpdateRange(const Groups& groups, int64_t begin, int64_t end,
                 const float* gradients, float* table, float* slots) {
  // This type is defined here, because a template argument loses the alignment.
  typedef float Vector
      __attribute__((vector_size(kFloats * 4), aligned(4), may_alias));
  constexpr int64_t kDim = kVectors * kFloats;
  const int64_t last = groups.splits[end] - 1;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t ahead = groups.rows[std::min(i + kAhead, end - 1)] * kDim;
    for (int64_t c = 0; c < kDim; c += kFloats) {
      __builtin_prefetch(table + ahead + c, 1, kSecondLevel);
      __builtin_prefetch(slots + ahead + c, 1, kSecondLevel);
    }
    Vector sums[kVectors] = {};
    for (int64_t k = groups.splits[i]; k < groups.splits[i + 1]; ++k) {
      const float* later =
          gradients + groups.gradient_of[std::min(k + kAhead, last)] * kDim;
      const float* gradient = gradients + groups.gradient_of[k] * kDim;
      for (int c = 0; c < kVectors; ++c) {
        __builtin_prefetch(later + c * kFloats, 0, kSecondLevel);
        sums[c] += *reinterpret_cast<const Vector*>(gradient + c * kFloats);
      }
    }
    for (int c = 0; c < kVectors; ++c) {
      const int64_t at = groups.rows[i] * kDim + c * kFloats;
      Vector& slot = *reinterpret_cast<Vector*>(slots + at);
      slot += sums[c] * sums[c];
      *reinterpret_cast<Vector*>(table + at) -= sums[c] * slot;
    }
  }
}

struct Loops {
  decltype(&LookupRange<1>) lookup;
  decltype(&UpdateRange<1>) update;
};

Loops LoopsOfDim(int64_t dim) {
  switch (dim) {
    case 8:
      return {LookupRange<1, kHalfLine>, UpdateRange<1, kHalfLine>};
    case 16:
      return {LookupRange<1>, UpdateRange<1>};
    case 32:
      return {LookupRange<2>, UpdateRange<2>};
    case 64:
      return {LookupRange<4>, UpdateRange<4>};
    case 128:
      return {LookupRange<8>, UpdateRange<8>};
    case 256:
      return {LookupRange<16>, UpdateRange<16>};
    case 512:
      return {LookupRange<32>, UpdateRange<32>};
    default:
      throw py::value_error(
          "`dim` must be one of 8, 16, 32, 64, 128, 256, 512");
  }
}

// The tables of the measurement, which have one slot variable each, and the
// activations and gradients of a batch.
class Roof {
 public:
  Roof(const std::vector<int64_t>& num_rows, int64_t dim, int64_t num_samples,
       int num_threads)
      : num_rows_(num_rows),
        dim_(dim),
        num_samples_(num_samples),
        loops_(LoopsOfDim(dim)),
        num_threads_(num_threads) {
    for (int64_t rows : num_rows) {
      Add(rows * dim, 1.0f, &tables_);
      Add(rows * dim, 1.0f, &slots_);
      Add(num_samples * dim, 0.0f, &outputs_);
      Add(num_samples * dim, 1e-3f, &gradients_);
    }
  }

  // For each feature, sums the rows of each sample and writes the sums. Returns
  // the duration in milliseconds. The duration does not include the check of
  // the ids.
  double Lookup(const std::vector<Ints>& ids, const std::vector<Ints>& splits) {
    CheckSizes(ids.size());
    CheckSizes(splits.size());
    for (size_t f = 0; f < ids.size(); ++f) {
      Check(layoutmap::CheckIds(View(ids[f]), num_rows_[f]));
      Check(layoutmap::CheckIds(View(splits[f]), ids[f].size() + 1));
      if (splits[f].size() * dim_ >
          static_cast<int64_t>(outputs_[f].size()) + dim_) {
        throw py::value_error("`splits` must have `num_samples` + 1 values");
      }
    }
    return Run(splits, 1, [&](size_t f, int64_t begin, int64_t end) {
      loops_.lookup(ids[f].data(), splits[f].data(), begin, end,
                    tables_[f].data(), outputs_[f].data());
    });
  }

  // Sums the gradients of each row, and then updates the row and its slot row.
  // The update rule is Adagrad without the square root and the division. The
  // rows must be distinct. The caller passes the indices of the gradients for
  // each row. The duration does not include the computation of these indices,
  // which takes no longer than reading the ids. Returns the duration in
  // milliseconds.
  double Update(const std::vector<Ints>& rows, const std::vector<Ints>& splits,
                const std::vector<Ints>& gradient_of) {
    CheckSizes(rows.size());
    CheckSizes(splits.size());
    CheckSizes(gradient_of.size());
    for (size_t f = 0; f < rows.size(); ++f) {
      Check(layoutmap::CheckIds(View(rows[f]), num_rows_[f]));
      Check(layoutmap::CheckIds(View(splits[f]), gradient_of[f].size() + 1));
      Check(layoutmap::CheckIds(View(gradient_of[f]), num_samples_));
      if (splits[f].size() != rows[f].size() + 1) {
        throw py::value_error("`splits` must have one value more than `rows`");
      }
    }
    return Run(splits, 1, [&](size_t f, int64_t begin, int64_t end) {
      loops_.update({rows[f].data(), splits[f].data(), gradient_of[f].data()},
                    begin, end, gradients_[f].data(), tables_[f].data(),
                    slots_[f].data());
    });
  }

 private:
  static void Add(int64_t size, float value,
                  std::vector<std::vector<float>>* matrices) {
    std::vector<float>& added = matrices->emplace_back();
    added.reserve(size);
    layoutmap::AdviseHugePages(added.data(), size * sizeof(float));
    added.assign(size, value);
  }

  void CheckSizes(size_t size) const {
    if (size == tables_.size()) return;
    throw py::value_error("The arguments must have one list for each table");
  }

  // Runs `work` on the items of all lists. Each thread takes the next block of
  // items as soon as it is free. Each list has `extra` more values than items.
  template <typename Work>
  double Run(const std::vector<Ints>& lists, int64_t extra, const Work& work) {
    std::vector<int64_t> starts = {0};
    for (const Ints& list : lists) {
      starts.push_back(starts.back() + list.size() - extra);
    }
    py::gil_scoped_release release;
    const int64_t block =
        std::max<int64_t>(starts.back() / num_threads_ / 8, 1);
    std::atomic<int64_t> taken{0};
    const auto take_blocks = [&] {
      for (int64_t begin = taken.fetch_add(block); begin < starts.back();
           begin = taken.fetch_add(block)) {
        const int64_t end = std::min(begin + block, starts.back());
        for (size_t f = 0; f < lists.size(); ++f) {
          const int64_t first = std::max(begin, starts[f]) - starts[f];
          const int64_t last = std::min(end, starts[f + 1]) - starts[f];
          if (first < last) work(f, first, last);
        }
      }
    };
    const auto started = std::chrono::steady_clock::now();
    std::vector<std::thread> threads;
    // The calling thread does not process blocks, because the system may start
    // a new thread on the core of the calling thread.
    for (int t = 0; t < num_threads_; ++t) threads.emplace_back(take_blocks);
    for (std::thread& thread : threads) thread.join();
    const std::chrono::duration<double, std::milli> took =
        std::chrono::steady_clock::now() - started;
    return took.count();
  }

  const std::vector<int64_t> num_rows_;
  const int64_t dim_;
  const int64_t num_samples_;
  const Loops loops_;
  const int num_threads_;
  std::vector<std::vector<float>> tables_, slots_, outputs_, gradients_;
};

}  // namespace

PYBIND11_MODULE(_roof, m) {
  m.doc() = "Measures the best speed of this machine on random rows.";
  py::class_<Roof>(m, "Roof")
      .def(py::init<const std::vector<int64_t>&, int64_t, int64_t, int>(),
           py::arg("num_rows"), py::arg("dim"), py::arg("num_samples"),
           py::arg("num_threads"))
      .def("lookup", &Roof::Lookup, py::arg("ids"), py::arg("splits"))
      .def("update", &Roof::Update, py::arg("rows"), py::arg("splits"),
           py::arg("gradient_of"));
}
