// The pooled gather: rows of a sharded table into activations.

#ifndef TF_LAYOUTMAP_CORE_TABLES_LOOKUP_H_
#define TF_LAYOUTMAP_CORE_TABLES_LOOKUP_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/views.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/simd/row_tuning.h"
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

// One lookup of several: what `Lookup` takes, of one of the two kinds of rows.
struct LookupTask {
  const ShardedView<const float>* table = nullptr;
  const ShardedView<const uint16_t>* half_table = nullptr;  // if `table` is not
  RowType row_type = RowType::kFloat32;
  Span<const uint32_t> rows;
  Span<const int64_t> splits;
  Span<const float> gains;
  MatrixView<float> out = {};
  const Quantization* quantization = nullptr;
  RowTuning tuning = {};  // without a tile: that of such rows
};

// The same as `Lookup` of each, in one parallel loop.
void LookupAll(const std::vector<LookupTask>& tasks, const RowKernels& kernels,
               const ParallelFor& parallel_for);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_TABLES_LOOKUP_H_
