// What this machine can do at best with random rows: plain C++ loops with
// prefetch, over memory that comes from the same malloc as TensorFlow's, but
// was written to before.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/check_ids.h"

namespace py = pybind11;

namespace {

constexpr int64_t kAhead = 16;
// The cache that rows are fetched into, as everywhere here.
constexpr int kSecondLevel = 2;
constexpr int64_t kFloatsPerLine = 16;

using Ints = py::array_t<int64_t, py::array::c_style>;
using layoutmap::Span;

Span<const int64_t> View(const Ints& values) {
  return {values.data(), static_cast<int64_t>(values.size())};
}

void Check(const layoutmap::Status& status) {
  if (!status.ok()) throw py::value_error(status.message());
}

// Tables, one slot variable each, and a batch's activations and gradients.
class Roof {
 public:
  Roof(const std::vector<int64_t>& num_rows, int64_t dim, int64_t num_samples,
       int num_threads)
      : num_rows_(num_rows), dim_(dim), num_threads_(num_threads) {
    if (dim % kFloatsPerLine != 0) {
      throw py::value_error("`dim` must be a multiple of 16");
    }
    for (int64_t rows : num_rows) {
      tables_.emplace_back(rows * dim, 1.0f);
      slots_.emplace_back(rows * dim, 1.0f);
      outputs_.emplace_back(num_samples * dim, 0.0f);
      gradients_.emplace_back(num_samples * dim, 1e-3f);
    }
  }

  // Sums the rows of each sample, by feature, and writes the sums.
  void Lookup(const std::vector<Ints>& ids, const std::vector<Ints>& splits) {
    CheckSizes(ids.size());
    CheckSizes(splits.size());
    for (size_t f = 0; f < ids.size(); ++f) {
      Check(layoutmap::CheckIds(View(ids[f]), num_rows_[f]));
      Check(layoutmap::CheckIds(View(splits[f]), ids[f].size() + 1));
      if (splits[f].size() * dim_ >
          static_cast<int64_t>(outputs_[f].size()) + dim_) {
        throw py::value_error("`splits` must be of `num_samples` samples");
      }
    }
    Run(splits, 1, [&](size_t f, int64_t begin, int64_t end) {
      LookupRange(ids[f].data(), splits[f].data(), begin, end,
                  tables_[f].data(), outputs_[f].data());
    });
  }

  // Reads, changes and writes each row and its slot row, and reads one row of
  // gradients for it: Adagrad without the root. No row may come twice.
  void Update(const std::vector<Ints>& rows) {
    CheckSizes(rows.size());
    for (size_t f = 0; f < rows.size(); ++f) {
      Check(layoutmap::CheckIds(View(rows[f]), num_rows_[f]));
    }
    Run(rows, 0, [&](size_t f, int64_t begin, int64_t end) {
      UpdateRange(rows[f].data(), begin, end, gradients_[f], tables_[f].data(),
                  slots_[f].data());
    });
  }

 private:
  void CheckSizes(size_t size) const {
    if (size == tables_.size()) return;
    throw py::value_error("One list must come for each table");
  }

  void LookupRange(const int64_t* ids, const int64_t* splits, int64_t begin,
                   int64_t end, const float* table, float* out) const {
    const int64_t last = splits[end] - 1;
    for (int64_t s = begin; s < end; ++s) {
      for (int64_t i = splits[s]; i < splits[s + 1]; ++i) {
        const float* ahead = table + ids[std::min(i + kAhead, last)] * dim_;
        for (int64_t c = 0; c < dim_; c += kFloatsPerLine) {
          __builtin_prefetch(ahead + c, 0, kSecondLevel);
        }
      }
      // A line at a time: its sums stay in registers.
      for (int64_t c = 0; c < dim_; c += kFloatsPerLine) {
        float sums[kFloatsPerLine] = {};
        for (int64_t i = splits[s]; i < splits[s + 1]; ++i) {
          const float* line = table + ids[i] * dim_ + c;
          for (int64_t j = 0; j < kFloatsPerLine; ++j) sums[j] += line[j];
        }
        for (int64_t j = 0; j < kFloatsPerLine; ++j) {
          out[s * dim_ + c + j] = sums[j];
        }
      }
    }
  }

  void UpdateRange(const int64_t* rows, int64_t begin, int64_t end,
                   const std::vector<float>& gradients, float* table,
                   float* slots) const {
    const int64_t num_gradients = static_cast<int64_t>(gradients.size()) / dim_;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t ahead = rows[std::min(i + kAhead, end - 1)] * dim_;
      for (int64_t c = 0; c < dim_; c += kFloatsPerLine) {
        __builtin_prefetch(table + ahead + c, 1, kSecondLevel);
        __builtin_prefetch(slots + ahead + c, 1, kSecondLevel);
      }
      const float* gradient = &gradients[i % num_gradients * dim_];
      float* row = table + rows[i] * dim_;
      float* slot = slots + rows[i] * dim_;
      for (int64_t c = 0; c < dim_; ++c) {
        slot[c] += gradient[c] * gradient[c];
        row[c] -= gradient[c] * slot[c];
      }
    }
  }

  // Divides the items of all lists evenly among the threads; a list has
  // `extra` more values than items.
  template <typename Work>
  void Run(const std::vector<Ints>& lists, int64_t extra, const Work& work) {
    std::vector<int64_t> starts = {0};
    for (const Ints& list : lists) {
      starts.push_back(starts.back() + list.size() - extra);
    }
    py::gil_scoped_release release;
    std::vector<std::thread> threads;
    for (int t = 0; t < num_threads_; ++t) {
      const int64_t begin = starts.back() * t / num_threads_;
      const int64_t end = starts.back() * (t + 1) / num_threads_;
      threads.emplace_back([&, begin, end] {
        for (size_t f = 0; f < lists.size(); ++f) {
          const int64_t first = std::max(begin, starts[f]) - starts[f];
          const int64_t last = std::min(end, starts[f + 1]) - starts[f];
          if (first < last) work(f, first, last);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  const std::vector<int64_t> num_rows_;
  const int64_t dim_;
  const int num_threads_;
  std::vector<std::vector<float>> tables_, slots_, outputs_, gradients_;
};

}  // namespace

PYBIND11_MODULE(_roof, m) {
  m.doc() = "What this machine can do at best with random rows.";
  py::class_<Roof>(m, "Roof")
      .def(py::init<const std::vector<int64_t>&, int64_t, int64_t, int>(),
           py::arg("num_rows"), py::arg("dim"), py::arg("num_samples"),
           py::arg("num_threads"))
      .def("lookup", &Roof::Lookup, py::arg("ids"), py::arg("splits"))
      .def("update", &Roof::Update, py::arg("rows"));
}
