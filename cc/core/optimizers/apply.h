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

// The unique rows of a step and their gradients. Each row has a range of
// positions, in summation order. Each position has a gradient row and a gain.
struct RowGradients {
  // The unique rows in ascending order, [num_unique].
  Span<const uint32_t> rows;
  // The positions of rows[u] are splits[u] to splits[u + 1] - 1. The shape is
  // [num_unique + 1].
  Span<const int64_t> splits;
  // For each position, the index of its gradient in `gradient_rows`,
  // [num_positions].
  Span<const uint32_t> gradient_of;
  // Gain of each position, [num_positions]. If empty, all gains are 1.
  Span<const float> gains;
  // Pointers to gradient rows, which have `dim` values each.
  Span<const float* const> gradient_rows;
};

// The update of one table, which has either float or 16-bit rows.
struct TableUpdate {
  Optimizer optimizer = Optimizer::kNone;
  Span<const float> hyperparameters;
  RowGradients gradients;
  const ShardedView<float>* table = nullptr;
  // Used if `table` is null.
  const HalfTable* half_table = nullptr;
  Span<const ShardedView<float>> slots;
  // If `tile` is 0, the default tuning is used.
  RowTuning tuning = {};
};

// Sums the gradients of each unique row. Then applies one step of the update
// rule to the row and its slot rows, in place. Each row is processed by one
// worker, which sums the gradients in the order of their positions. Therefore,
// results are bitwise identical for any number of workers.
void ApplyGradients(Optimizer optimizer, Span<const float> hyperparameters,
                    const RowGradients& gradients,
                    const ShardedView<float>& table,
                    Span<const ShardedView<float>> slots,
                    const RowKernels& kernels, const ParallelFor& parallel_for);

// Applies gradients to a table of 16-bit rows. The slot variables have float
// rows.
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
