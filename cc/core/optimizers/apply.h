// Applies gradients of activations to rows and slot variables.

#ifndef TF_LAYOUTMAP_CORE_OPTIMIZERS_APPLY_H_
#define TF_LAYOUTMAP_CORE_OPTIMIZERS_APPLY_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/simd/row_tuning.h"
#include "cc/core/tables/half_table.h"
#include "cc/core/tables/sharded_view.h"

namespace layoutmap {

// The unique rows of a step. Each row has positions, in summation order; each
// position has a gradient row and a gain.
struct RowGradients {
  Span<const uint32_t> rows;   // ascending, [num_unique]
  Span<const int64_t> splits;  // [num_unique + 1]
  Span<const uint32_t>
      gradient_of;          // [num_positions], index into gradient_rows
  Span<const float> gains;  // [num_positions], or empty: all gains are 1
  Span<const float* const> gradient_rows;  // each [dim]
};

// The update of one table, which has either float or 16-bit rows.
struct TableUpdate {
  Optimizer optimizer = Optimizer::kNone;
  Span<const float> hyperparameters;
  RowGradients gradients;
  const ShardedView<float>* table = nullptr;
  const HalfTable* half_table = nullptr;  // used if `table` is null
  Span<const ShardedView<float>> slots;
  RowTuning tuning = {};  // default if `tile` is 0
};

// Sums the gradients of each unique row, then applies one step of the update
// rule to the row and its slot rows, in place. Each row is written by one
// worker and summed in the given order, so results are bitwise identical for
// any number of workers.
void ApplyGradients(Optimizer optimizer, Span<const float> hyperparameters,
                    const RowGradients& gradients,
                    const ShardedView<float>& table,
                    Span<const ShardedView<float>> slots,
                    const RowKernels& kernels, const ParallelFor& parallel_for);

// Applies gradients to a table of 16-bit rows. Slot rows are floats.
void ApplyGradients(Optimizer optimizer, Span<const float> hyperparameters,
                    const RowGradients& gradients, const HalfTable& table,
                    Span<const ShardedView<float>> slots,
                    const RowKernels& kernels, const ParallelFor& parallel_for);

// Applies gradients to several tables in one parallel loop.
void ApplyGradientsToAll(const std::vector<TableUpdate>& updates,
                         const RowKernels& kernels,
                         const ParallelFor& parallel_for);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_OPTIMIZERS_APPLY_H_
