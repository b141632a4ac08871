// The pooled gather: rows of a sharded table into activations.

#ifndef TF_LAYOUTMAP_CORE_TABLES_LOOKUP_H_
#define TF_LAYOUTMAP_CORE_TABLES_LOOKUP_H_

#include <cstdint>
#include <functional>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/views.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/tables/sharded_view.h"

namespace layoutmap {

// Adds up the rows of each output, scaled by their gains:
//
//   out[o, :] = sum over i in [splits[o], splits[o + 1]) of
//               gains[i] * table[rows[i], :]
//
// out is [num_outputs, dim] and overwritten; an output without ids becomes
// zeros. rows come validated; empty gains are 1 each. Sums run in the order of
// ids, so the result is the same to the bit for any number of workers. Rows are
// quantized first if `quantization` is not null.
void Lookup(const ShardedView<const float>& table, Span<const uint32_t> rows,
            Span<const int64_t> splits, Span<const float> gains,
            const RowKernels& kernels, const ParallelFor& parallel_for,
            MatrixView<float> out, const Quantization* quantization = nullptr);

// The same of rows of 16 bits, which are read as floats.
void Lookup(const ShardedView<const uint16_t>& table, RowType row_type,
            Span<const uint32_t> rows, Span<const int64_t> splits,
            Span<const float> gains, const RowKernels& kernels,
            const ParallelFor& parallel_for, MatrixView<float> out,
            const Quantization* quantization = nullptr);

// Walks over an axis on which item i takes splits[i + 1] - splits[i] units of
// its own plus `per_item`: calls `work` with ranges of items that cost about
// the same, whatever the skew.
void ForItems(Span<const int64_t> splits, int64_t per_item, int64_t unit_cost,
              const ParallelFor& parallel_for,
              const std::function<void(int64_t begin, int64_t end)>& work);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_TABLES_LOOKUP_H_
