// The pooled gather, which sums rows of a sharded table to compute activations.

#ifndef TF_LAYOUTMAP_CORE_TABLES_LOOKUP_H_
#define TF_LAYOUTMAP_CORE_TABLES_LOOKUP_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/row_ids.h"
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
// `out` is [num_outputs, dim] and is overwritten. Outputs without ids are set
// to zeros. `rows` must have been validated. If `gains` is empty, all gains are
// 1. The rows are added in id order, so results are bitwise identical for any
// number of workers. If `quantization` is not null, each row is quantized
// before it is added.
void Lookup(const ShardedView<const float>& table, const RowIds& rows,
            Span<const int64_t> splits, Span<const float> gains,
            const RowKernels& kernels, const ParallelFor& parallel_for,
            MatrixView<float> out, const Quantization* quantization = nullptr);

// Does the same for 16-bit rows, which are converted to float before they are
// added.
void Lookup(const ShardedView<const uint16_t>& table, RowType row_type,
            const RowIds& rows, Span<const int64_t> splits,
            Span<const float> gains, const RowKernels& kernels,
            const ParallelFor& parallel_for, MatrixView<float> out,
            const Quantization* quantization = nullptr);

// The arguments of one lookup. The table has either float rows or 16-bit rows.
struct LookupTask {
  const ShardedView<const float>* table = nullptr;
  const ShardedView<const uint16_t>* half_table =
      // Used if `table` is null.
      nullptr;
  RowType row_type = RowType::kFloat32;
  RowIds rows;
  // The ids of the outputs. If `splits` is empty, `even` contains them. Then
  // the table must have one shard, and `quantization` must be null.
  Span<const int64_t> splits;
  EvenIds even;
  // One gain per id, or one gain per output. If both are empty, all gains are
  // 1.
  Span<const float> gains;
  Span<const float> output_gains;
  MatrixView<float> out = {};
  const Quantization* quantization = nullptr;
  // If `tile` is 0, the default tuning is used.
  RowTuning tuning = {};
};

// Runs several lookups in one parallel loop. The results equal the results of
// separate calls of `Lookup`.
void LookupAll(const std::vector<LookupTask>& tasks, const RowKernels& kernels,
               const ParallelFor& parallel_for);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_TABLES_LOOKUP_H_
