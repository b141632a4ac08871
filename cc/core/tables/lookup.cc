#include "cc/core/tables/lookup.h"

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/core/base/item_loops.h"
#include "cc/core/base/parallel_for.h"
#include "cc/core/base/row_ids.h"
#include "cc/core/base/row_queue.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/views.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/simd/row_tuning.h"
#include "cc/core/tables/sharded_view.h"

namespace layoutmap {
namespace {

// Looks up the outputs of a task whose outputs have equal numbers of ids.
template <typename T, typename Id>
void LookupEvenRange(const LookupTask& task, const ShardedView<const T>& table,
                     Span<const Id> ids, const RowKernels& kernels,
                     LookupArgs args) {
  assert(table.shards.size() == 1 && task.quantization == nullptr);
  const EvenIds& even = task.even;
  const int64_t row_bytes = table.dim * static_cast<int64_t>(sizeof(T));
  // The prefetch distance is rounded up to full outputs.
  const int64_t rows_ahead = LookupTuning(args.row_type).ahead;
  args.ahead = even.size > 0 ? (rows_ahead + even.size - 1) / even.size : 0;
  const int64_t prefetch_end = std::min(args.begin + args.ahead, args.end);
  for (int64_t o = args.begin; o < prefetch_end; ++o) {
    for (int64_t i = 0; i < even.size; ++i) {
      const int64_t id = ids[even.first + o * even.stride + i];
      PrefetchRow(table.shards[0] + id * table.dim, row_bytes);
    }
  }
  args.table = table.shards[0];
  args.ids = ids.data();
  args.even = even;
  kernels.lookup(args);
}

template <typename T, typename Id>
void LookupRange(const LookupTask& task, const ShardedView<const T>& table,
                 Span<const Id> ids, const RowKernels& kernels,
                 LookupArgs args) {
  if (task.splits.empty()) {
    return LookupEvenRange(task, table, ids, kernels, args);
  }
  const Span<const int64_t> splits = task.splits;
  const int64_t row_bytes = table.dim * static_cast<int64_t>(sizeof(T));
  const int64_t begin = args.begin, end = args.end, last = splits[end];
  const RowTuning tuning =
      task.tuning.tile > 0 ? task.tuning : LookupTuning(args.row_type);
  args.ahead = tuning.ahead;
  // This loop prefetches the first rows. The kernel prefetches the other rows.
  const int64_t prefetch_end = std::min(splits[begin] + tuning.ahead, last);
  for (int64_t i = splits[begin]; i < prefetch_end; ++i) {
    PrefetchRow(table.row(ids[i]), row_bytes);
  }
  if (table.shards.size() == 1 && task.quantization == nullptr) {
    args.table = table.shards[0];
    args.ids = ids.data();
    args.known = last;
    return kernels.lookup(args);
  }
  std::vector<const void*> row_of;
  row_of.reserve(tuning.tile + tuning.ahead);
  for (int64_t o = begin; o < end; o = args.end) {
    const int64_t first = splits[o];
    int64_t next = o + 1;
    while (next < end && splits[next + 1] - first <= tuning.tile) ++next;
    // The pointers include the first rows of the next tile, which the kernel
    // prefetches.
    const int64_t known = std::min(splits[next] + tuning.ahead, last);
    row_of.resize(known - first);
    table.WithRow([&](auto row) {
      for (int64_t i = first; i < known; ++i) row_of[i - first] = row(ids[i]);
    });
    args.row_of = row_of.data();
    args.first = first;
    args.known = known;
    args.begin = o;
    args.end = next;
    kernels.lookup(args);
  }
}

template <typename T>
void LookupRange(const LookupTask& task, const ShardedView<const T>& table,
                 RowType row_type, const RowKernels& kernels, int64_t begin,
                 int64_t end) {
  LookupArgs args;
  args.row_type = row_type;
  args.id_type = task.rows.type();
  args.gains = task.gains.empty() ? nullptr : task.gains.data();
  args.output_gains =
      task.output_gains.empty() ? nullptr : task.output_gains.data();
  args.splits = task.splits.empty() ? nullptr : task.splits.data();
  args.begin = begin;
  args.end = end;
  args.dim = table.dim;
  args.out = task.out.data;
  args.quantization = task.quantization;
  task.rows.With(
      [&](auto ids) { LookupRange(task, table, ids, kernels, args); });
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
    const bool is_even = task.splits.empty();
    assert(is_even || task.out.num_rows == task.splits.size() - 1);
    assert(task.gains.empty() || task.gains.size() == task.rows.size());
    assert(task.output_gains.empty() ||
           task.output_gains.size() == task.out.num_rows);
    // Estimated costs: reading rows from memory takes about 1 ns per 4 floats.
    // Writing outputs, which mostly stay in the cache, takes about 1 ns per 16
    // floats.
    loops.push_back({task.splits, is_even ? task.even.size + 1 : 1,
                     8 + task.out.dim / 4, is_even ? task.out.num_rows : 0});
  }
  RunItemLoops(loops, parallel_for, [&](size_t t, int64_t begin, int64_t end) {
    RunTask(tasks[t], kernels, begin, end);
  });
}

namespace {

// Returns a task without a table.
LookupTask MakeTask(const RowIds& rows, Span<const int64_t> splits,
                    Span<const float> gains, MatrixView<float> out,
                    const Quantization* quantization) {
  LookupTask task;
  task.rows = rows;
  task.splits = splits;
  task.gains = gains;
  task.out = out;
  task.quantization = quantization;
  return task;
}

}  // namespace

void Lookup(const ShardedView<const float>& table, const RowIds& rows,
            Span<const int64_t> splits, Span<const float> gains,
            const RowKernels& kernels, const ParallelFor& parallel_for,
            MatrixView<float> out, const Quantization* quantization) {
  LookupTask task = MakeTask(rows, splits, gains, out, quantization);
  task.table = &table;
  LookupAll({task}, kernels, parallel_for);
}

void Lookup(const ShardedView<const uint16_t>& table, RowType row_type,
            const RowIds& rows, Span<const int64_t> splits,
            Span<const float> gains, const RowKernels& kernels,
            const ParallelFor& parallel_for, MatrixView<float> out,
            const Quantization* quantization) {
  LookupTask task = MakeTask(rows, splits, gains, out, quantization);
  task.half_table = &table;
  task.row_type = row_type;
  LookupAll({task}, kernels, parallel_for);
}

}  // namespace layoutmap
