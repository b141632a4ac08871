// The update: gradients of activations onto rows and slot variables.

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

// The unique rows of a step, and for each of their positions (in the order in
// which they are summed) the gradient row it belongs to and its gain.
struct RowGradients {
  Span<const uint32_t> rows;         // ascending, [num_unique]
  Span<const int64_t> splits;        // [num_unique + 1]
  Span<const uint32_t> gradient_of;  // [num_positions], into gradient_rows
  Span<const float> gains;           // [num_positions] or empty: 1 each
  Span<const float* const> gradient_rows;  // each [dim]
};

// The update of one table, on rows of one of the two kinds.
struct TableUpdate {
  Optimizer optimizer = Optimizer::kNone;
  Span<const float> hyperparameters;
  RowGradients gradients;
  const ShardedView<float>* table = nullptr;
  const HalfTable* half_table = nullptr;  // if `table` is not
  Span<const ShardedView<float>> slots;
  RowTuning tuning = {};  // without a tile: that of such rows
};

// Sums the gradients of each unique row, then runs one step of the rule on it
// and its slot rows, in place. Each row is written by one worker and summed in
// the given order: the same bits for any number of workers.
void ApplyGradients(Optimizer optimizer, Span<const float> hyperparameters,
                    const RowGradients& gradients,
                    const ShardedView<float>& table,
                    Span<const ShardedView<float>> slots,
                    const RowKernels& kernels, const ParallelFor& parallel_for);

// The same on a table of 16-bit rows. Slot rows are floats.
void ApplyGradients(Optimizer optimizer, Span<const float> hyperparameters,
                    const RowGradients& gradients, const HalfTable& table,
                    Span<const ShardedView<float>> slots,
                    const RowKernels& kernels, const ParallelFor& parallel_for);

// The same on several tables, in one parallel loop.
void ApplyGradientsToAll(const std::vector<TableUpdate>& updates,
                         const RowKernels& kernels,
                         const ParallelFor& parallel_for);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_OPTIMIZERS_APPLY_H_
