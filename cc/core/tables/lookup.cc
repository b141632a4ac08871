#include "cc/core/tables/lookup.h"

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <functional>
#include <vector>

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

template <typename T>
void LookupRows(const ShardedView<const T>& table, RowType row_type,
                Span<const uint32_t> rows, Span<const int64_t> splits,
                Span<const float> gains, const RowKernels& kernels,
                const ParallelFor& parallel_for, MatrixView<float> out,
                const Quantization* quantization) {
  assert(out.num_rows == splits.size() - 1 && out.dim == table.dim);
  assert(gains.empty() || gains.size() == rows.size());
  // A row comes from memory, an output mostly stays in cache: about 1 ns per
  // 4 floats and 1 ns per 16.
  ForItems(splits, 1, 8 + table.dim / 4, parallel_for,
           [&](int64_t begin, int64_t end) {
             LookupRange(table, row_type, rows, splits, gains, kernels,
                         quantization, begin, end, out);
           });
}

}  // namespace

void ForItems(Span<const int64_t> splits, int64_t per_item, int64_t unit_cost,
              const ParallelFor& parallel_for,
              const std::function<void(int64_t begin, int64_t end)>& work) {
  const int64_t num_items = splits.size() - 1;
  auto start_of = [&](int64_t item) { return splits[item] + item * per_item; };
  // The first item that starts at or after `unit`.
  auto item_at = [&](int64_t unit) {
    int64_t low = 0, high = num_items;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (start_of(middle) < unit) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  };
  parallel_for(start_of(num_items), unit_cost, [&](int64_t begin, int64_t end) {
    const int64_t first = item_at(begin);
    const int64_t last = item_at(end);
    if (first < last) work(first, last);
  });
}

void Lookup(const ShardedView<const float>& table, Span<const uint32_t> rows,
            Span<const int64_t> splits, Span<const float> gains,
            const RowKernels& kernels, const ParallelFor& parallel_for,
            MatrixView<float> out, const Quantization* quantization) {
  LookupRows(table, RowType::kFloat32, rows, splits, gains, kernels,
             parallel_for, out, quantization);
}

void Lookup(const ShardedView<const uint16_t>& table, RowType row_type,
            Span<const uint32_t> rows, Span<const int64_t> splits,
            Span<const float> gains, const RowKernels& kernels,
            const ParallelFor& parallel_for, MatrixView<float> out,
            const Quantization* quantization) {
  LookupRows(table, row_type, rows, splits, gains, kernels, parallel_for, out,
             quantization);
}

}  // namespace layoutmap
