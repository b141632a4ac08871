// The pooled gather: sums rows of a sharded table into activations.

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

// Sums the rows of each output, scaled by gains:
//
//   out[o, :] = sum over i in [splits[o], splits[o + 1]) of
//               gains[i] * table[rows[i], :]
//
// `out` is [num_outputs, dim] and is overwritten. Outputs without ids become
// zeros. `rows` must have been validated; empty `gains` mean gains of 1. Sums
// run in id order, so results are bitwise identical for any number of workers.
// Rows are quantized first if `quantization` is not null.
void Lookup(const ShardedView<const float>& table, Span<const uint32_t> rows,
            Span<const int64_t> splits, Span<const float> gains,
            const RowKernels& kernels, const ParallelFor& parallel_for,
            MatrixView<float> out, const Quantization* quantization = nullptr);

// Looks up 16-bit rows, which are converted to float.
void Lookup(const ShardedView<const uint16_t>& table, RowType row_type,
            Span<const uint32_t> rows, Span<const int64_t> splits,
            Span<const float> gains, const RowKernels& kernels,
            const ParallelFor& parallel_for, MatrixView<float> out,
            const Quantization* quantization = nullptr);

// The arguments of one of several lookups. The table has either float or 16-bit
// rows.
struct LookupTask {
  const ShardedView<const float>* table = nullptr;
  const ShardedView<const uint16_t>* half_table =
      nullptr;  // if `table` is null
  RowType row_type = RowType::kFloat32;
  Span<const uint32_t> rows;
  Span<const int64_t> splits;
  Span<const float> gains;
  MatrixView<float> out = {};
  const Quantization* quantization = nullptr;
  RowTuning tuning = {};  // default if `tile` is 0
};

// Runs all lookups in one parallel loop. The results equal the results of
// separate `Lookup` calls.
void LookupAll(const std::vector<LookupTask>& tasks, const RowKernels& kernels,
               const ParallelFor& parallel_for);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_TABLES_LOOKUP_H_
