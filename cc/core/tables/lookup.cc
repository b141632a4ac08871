#include "cc/core/tables/lookup.h"

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/core/base/item_loops.h"
#include "cc/core/base/parallel_for.h"
#include "cc/core/base/row_queue.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/views.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/simd/row_tuning.h"
#include "cc/core/tables/sharded_view.h"

namespace layoutmap {
namespace {

template <typename T>
void LookupRange(const LookupTask& task, const ShardedView<const T>& table,
                 RowType row_type, const RowKernels& kernels, int64_t begin,
                 int64_t end) {
  const Span<const int64_t> splits = task.splits;
  const int64_t row_bytes = table.dim * static_cast<int64_t>(sizeof(T));
  const RowTuning tuning =
      task.tuning.tile > 0 ? task.tuning : LookupTuning(row_type);
  std::vector<const void*> row_of;
  row_of.reserve(tuning.tile + tuning.ahead);
  // After the last row, the kernel prefetches this address, which must be
  // valid.
  const void* const valid_address = task.out.data;
  const int64_t last = splits[end];
  // This loop prefetches the first rows. The kernel prefetches the rows of a
  // later tile while it processes the preceding tile.
  const int64_t prefetch_end = std::min(splits[begin] + tuning.ahead, last);
  for (int64_t i = splits[begin]; i < prefetch_end; ++i) {
    PrefetchRow(table.row(task.rows[i]), row_bytes);
  }
  while (begin < end) {
    const int64_t first = splits[begin];
    int64_t next = begin + 1;
    while (next < end && splits[next + 1] - first <= tuning.tile) ++next;
    const int64_t size = splits[next] - first;
    const int64_t known = std::min(size + tuning.ahead, last - first);
    row_of.resize(size + tuning.ahead);
    table.WithRow([&](auto row) {
      for (int64_t i = 0; i < known; ++i) row_of[i] = row(task.rows[first + i]);
    });
    std::fill(row_of.begin() + known, row_of.end(), valid_address);
    LookupArgs args;
    args.row_type = row_type;
    args.row_of = row_of.data();
    args.gains = task.gains.empty() ? nullptr : task.gains.data() + first;
    args.splits = splits.data();
    args.first = first;
    args.begin = begin;
    args.end = next;
    args.dim = table.dim;
    args.ahead = tuning.ahead;
    args.out = task.out.data;
    args.quantization = task.quantization;
    kernels.lookup(args);
    begin = next;
  }
}

void RunTask(const LookupTask& task, const RowKernels& kernels, int64_t begin,
             int64_t end) {
  if (task.table != nullptr) {
    return LookupRange(task, *task.table, RowType::kFloat32, kernels, begin,
                       end);
  }
  LookupRange(task, *task.half_table, task.row_type, kernels, begin, end);
}

}  // namespace

void LookupAll(const std::vector<LookupTask>& tasks, const RowKernels& kernels,
               const ParallelFor& parallel_for) {
  std::vector<ItemLoop> loops;
  loops.reserve(tasks.size());
  for (const LookupTask& task : tasks) {
    assert(task.out.num_rows == task.splits.size() - 1);
    assert(task.gains.empty() || task.gains.size() == task.rows.size());
    // Estimated costs: reading rows from memory takes about 1 ns per 4 floats.
    // Writing outputs, which mostly stay in the cache, takes about 1 ns per 16
    // floats.
    loops.push_back({task.splits, 1, 8 + task.out.dim / 4});
  }
  RunItemLoops(loops, parallel_for, [&](size_t t, int64_t begin, int64_t end) {
    RunTask(tasks[t], kernels, begin, end);
  });
}

void Lookup(const ShardedView<const float>& table, Span<const uint32_t> rows,
            Span<const int64_t> splits, Span<const float> gains,
            const RowKernels& kernels, const ParallelFor& parallel_for,
            MatrixView<float> out, const Quantization* quantization) {
  LookupAll({{&table, nullptr, RowType::kFloat32, rows, splits, gains, out,
              quantization}},
            kernels, parallel_for);
}

void Lookup(const ShardedView<const uint16_t>& table, RowType row_type,
            Span<const uint32_t> rows, Span<const int64_t> splits,
            Span<const float> gains, const RowKernels& kernels,
            const ParallelFor& parallel_for, MatrixView<float> out,
            const Quantization* quantization) {
  LookupAll(
      {{nullptr, &table, row_type, rows, splits, gains, out, quantization}},
      kernels, parallel_for);
}

}  // namespace layoutmap
