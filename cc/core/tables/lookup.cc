#include "cc/core/tables/lookup.h"

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/core/base/item_loops.h"
#include "cc/core/base/parallel_for.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/views.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/tables/sharded_view.h"

namespace layoutmap {
namespace {

// Pointers are resolved for about this many ids at a time: 4 KiB of them stay
// in the first-level cache while the kernel runs through them.
constexpr int64_t kTile = 512;

template <typename T>
void LookupRange(const ShardedView<const T>& table, RowType row_type,
                 Span<const uint32_t> rows, Span<const int64_t> splits,
                 Span<const float> gains, const RowKernels& kernels,
                 const Quantization* quantization, int64_t begin, int64_t end,
                 MatrixView<float> out) {
  std::vector<const void*> row_of;
  row_of.reserve(kTile + kAhead);
  // Prefetching past the last row must still point somewhere harmless.
  const void* const anywhere = out.data;
  const int64_t last = splits[end];
  while (begin < end) {
    const int64_t first = splits[begin];
    int64_t next = begin + 1;
    while (next < end && splits[next + 1] - first <= kTile) ++next;
    const int64_t size = splits[next] - first;
    row_of.assign(size + kAhead, anywhere);
    const int64_t known = std::min(size + kAhead, last - first);
    for (int64_t i = 0; i < known; ++i) row_of[i] = table.row(rows[first + i]);
    for (int64_t i = 0; i < std::min(known, kAhead); ++i) {
      __builtin_prefetch(row_of[i]);
    }
    LookupArgs args;
    args.row_type = row_type;
    args.row_of = row_of.data();
    args.gains = gains.empty() ? nullptr : gains.data() + first;
    args.splits = splits.data();
    args.first = first;
    args.begin = begin;
    args.end = next;
    args.dim = table.dim;
    args.out = out.data;
    args.quantization = quantization;
    kernels.lookup(args);
    begin = next;
  }
}

void RunTask(const LookupTask& task, const RowKernels& kernels, int64_t begin,
             int64_t end) {
  if (task.table != nullptr) {
    return LookupRange(*task.table, RowType::kFloat32, task.rows, task.splits,
                       task.gains, kernels, task.quantization, begin, end,
                       task.out);
  }
  LookupRange(*task.half_table, task.row_type, task.rows, task.splits,
              task.gains, kernels, task.quantization, begin, end, task.out);
}

}  // namespace

void LookupAll(const std::vector<LookupTask>& tasks, const RowKernels& kernels,
               const ParallelFor& parallel_for) {
  std::vector<ItemLoop> loops;
  loops.reserve(tasks.size());
  for (const LookupTask& task : tasks) {
    assert(task.out.num_rows == task.splits.size() - 1);
    assert(task.gains.empty() || task.gains.size() == task.rows.size());
    // A row comes from memory, an output mostly stays in cache: about 1 ns per
    // 4 floats and 1 ns per 16.
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
