// One enqueued batch on its way through the engine.

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

// What one replica enqueued, by feature. Not written to after it is made.
using Batch = std::vector<RaggedIds>;

// The batches that lookups and updates work on now. A reset forgets their steps
// and cannot stop those who read or write their rows.
class BatchesInUse {
 public:
  // In use as long as the caller, or a step that it was given, holds it.
  void Add(const std::shared_ptr<const Batch>& batch);
  void Visit(const std::function<void(const Batch&)>& visit) const;

 private:
  std::vector<std::weak_ptr<const Batch>> batches_;
};

// What one replica's activations got back, by feature, [num_outputs, dim]
// each; `keep_alive` holds their memory. Hyperparameters, by table, are for
// whoever runs the update; those of the replica that completes it count.
struct BatchGradients {
  std::vector<Span<const float>> features;
  std::vector<std::vector<float>> hyperparameters;
  std::shared_ptr<const void> keep_alive;
};

// What the backward pass of a table needs and the ids alone decide, so that it
// is worked out at enqueue and the update never looks at the ids again:
//
//   unique row    rows      2        5     9
//   its positions splits    0        3     4        6
//   output row    gradient_of  0  4  1  | 0  | 2  7
//
// Output rows are numbered through the table's features in order, inside a
// feature through the replicas, so positions stand in the order in which their
// gradients are summed.
struct TableStep {
  std::vector<uint32_t> rows;
  std::vector<int64_t> splits;
  std::vector<uint32_t> gradient_of;
  std::vector<float> gains;  // empty: 1 each
};

// `positions`, if it is not null, becomes where each position stands in the
// table's batches, numbered through like output rows.
TableStep PrepareTable(const EngineConfig& config, int32_t table,
                       const std::vector<std::shared_ptr<const Batch>>& batches,
                       std::vector<uint32_t>* positions = nullptr,
                       const ParallelFor& parallel_for = SerialFor);

// The same of all tables.
void PrepareTables(const EngineConfig& config,
                   const std::vector<std::shared_ptr<const Batch>>& batches,
                   const ParallelFor& parallel_for,
                   std::vector<TableStep>* tables);

// Refuses gradients that are not shaped like the activations of a batch.
Status CheckGradients(const EngineConfig& config, const Batch& batch,
                      const BatchGradients& gradients);

// The gradient row of each output row, in the numbering of `TableStep`.
std::vector<const float*> GradientRows(
    const EngineConfig& config, int32_t table,
    const std::vector<BatchGradients>& gradients);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_STEPS_STEP_H_
