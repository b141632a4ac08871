// What this machine can do at best with random rows: plain C++ loops with
// prefetch, over memory that comes from the same malloc as TensorFlow's.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
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

using Rows = py::array_t<int64_t, py::array::c_style>;

// A table of rows and one slot variable.
class Roof {
 public:
  Roof(int64_t num_rows, int64_t dim, int num_threads)
      : num_rows_(num_rows),
        dim_(dim),
        num_threads_(num_threads),
        table_(num_rows * dim, 1.0f),
        slot_(num_rows * dim, 1.0f) {
    if (dim % kFloatsPerLine != 0) {
      throw py::value_error("`dim` must be a multiple of 16");
    }
  }

  // Reads each row once, in the order given.
  float Gather(const Rows& rows) {
    std::vector<float> sums(num_threads_);
    Run(rows, [&](int thread, const int64_t* row, int64_t count) {
      float lanes[kFloatsPerLine] = {};
      for (int64_t i = 0; i < count; ++i) {
        const float* ahead =
            &table_[row[std::min(i + kAhead, count - 1)] * dim_];
        for (int64_t c = 0; c < dim_; c += kFloatsPerLine) {
          __builtin_prefetch(ahead + c, 0, kSecondLevel);
        }
        const float* values = &table_[row[i] * dim_];
        for (int64_t c = 0; c < dim_; c += kFloatsPerLine) {
          for (int64_t j = 0; j < kFloatsPerLine; ++j) {
            lanes[j] += values[c + j];
          }
        }
      }
      for (float lane : lanes) sums[thread] += lane;
    });
    float sum = 0;
    for (float s : sums) sum += s;
    return sum;
  }

  // Reads, changes and writes each row and its slot row, in the order given.
  // No row may come twice.
  void ReadModifyWrite(const Rows& rows) {
    Run(rows, [&](int, const int64_t* row, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t ahead = row[std::min(i + kAhead, count - 1)] * dim_;
        for (int64_t c = 0; c < dim_; c += kFloatsPerLine) {
          __builtin_prefetch(&table_[ahead + c], 1, kSecondLevel);
          __builtin_prefetch(&slot_[ahead + c], 1, kSecondLevel);
        }
        float* values = &table_[row[i] * dim_];
        float* slots = &slot_[row[i] * dim_];
        for (int64_t c = 0; c < dim_; ++c) {
          slots[c] += 1.0f;
          values[c] += slots[c];
        }
      }
    });
  }

 private:
  template <typename Work>
  void Run(const Rows& rows, const Work& work) {
    const int64_t size = rows.size();
    const int64_t* data = rows.data();
    const layoutmap::Status status = layoutmap::CheckIds(
        layoutmap::Span<const int64_t>(data, size), num_rows_);
    if (!status.ok()) throw py::value_error(status.message());
    py::gil_scoped_release release;
    std::vector<std::thread> threads;
    for (int t = 0; t < num_threads_; ++t) {
      const int64_t begin = size * t / num_threads_;
      const int64_t end = size * (t + 1) / num_threads_;
      threads.emplace_back([&, t, begin, end] {
        if (begin < end) work(t, data + begin, end - begin);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  int64_t num_rows_;
  int64_t dim_;
  int num_threads_;
  std::vector<float> table_;
  std::vector<float> slot_;
};

}  // namespace

PYBIND11_MODULE(_roof, m) {
  m.doc() = "What this machine can do at best with random rows.";
  py::class_<Roof>(m, "Roof")
      .def(py::init<int64_t, int64_t, int>(), py::arg("num_rows"),
           py::arg("dim"), py::arg("num_threads"))
      .def("gather", &Roof::Gather, py::arg("rows"))
      .def("read_modify_write", &Roof::ReadModifyWrite, py::arg("rows"));
}
