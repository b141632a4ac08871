// The batches, gradients and derived data of an engine step.

#ifndef TF_LAYOUTMAP_CORE_STEPS_STEP_H_
#define TF_LAYOUTMAP_CORE_STEPS_STEP_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/steps/engine_config.h"

namespace layoutmap {

// The ids that one replica enqueued, by feature. Immutable after its creation.
using Batch = std::vector<RaggedIds>;

// The batches of running lookups and updates. `Reset` discards their steps, but
// cannot stop threads that read or write their rows.
class BatchesInUse {
 public:
  // Adds a batch. It is in use as long as another object, such as the caller or
  // a step, holds it.
  void Add(const std::shared_ptr<const Batch>& batch);
  void Visit(const std::function<void(const Batch&)>& visit) const;

 private:
  std::vector<std::weak_ptr<const Batch>> batches_;
};

// The gradients of one replica's activations, by feature, [num_outputs, dim]
// each. `keep_alive` owns their memory. `hyperparameters`, by table, are used
// if this replica completes the step and thereby runs the update.
struct BatchGradients {
  std::vector<Span<const float>> features;
  std::vector<std::vector<float>> hyperparameters;
  std::shared_ptr<const void> keep_alive;
};

// The data of a table's backward pass that only depends on the ids. It is
// computed at enqueue, so that the update does not read the ids again:
//
//   unique row    rows      2        5     9
//   its positions splits    0        3     4        6
//   output row    gradient_of  0  4  1  | 0  | 2  7
//
// Output rows are numbered over the table's features in order, and over the
// replicas within a feature. Positions are therefore in the order in which
// their gradients are summed.
struct TableStep {
  std::vector<uint32_t> rows;
  std::vector<int64_t> splits;
  std::vector<uint32_t> gradient_of;
  std::vector<float> gains;  // empty: all gains are 1
};

// Prepares one table. If `positions` is not null, it receives the index of each
// position in the table's batches, which are numbered like output rows.
TableStep PrepareTable(const EngineConfig& config, int32_t table,
                       const std::vector<std::shared_ptr<const Batch>>& batches,
                       std::vector<uint32_t>* positions = nullptr,
                       const ParallelFor& parallel_for = SerialFor);

// Prepares all tables.
void PrepareTables(const EngineConfig& config,
                   const std::vector<std::shared_ptr<const Batch>>& batches,
                   const ParallelFor& parallel_for,
                   std::vector<TableStep>* tables);

// Returns an error if the gradients do not have the shapes of the activations
// of a batch.
Status CheckGradients(const EngineConfig& config, const Batch& batch,
                      const BatchGradients& gradients);

// Returns the gradient row of each output row, in the order of `TableStep`.
std::vector<const float*> GradientRows(
    const EngineConfig& config, int32_t table,
    const std::vector<BatchGradients>& gradients);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_STEPS_STEP_H_
