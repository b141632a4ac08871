// The batches of an engine step, the gradients of the step, and data that the
// engine computes from them.

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

// The ids that one replica enqueued, with one element per feature. A batch is
// not changed after its creation.
using Batch = std::vector<RaggedIds>;

// The batches of running lookups and updates. `HostEngine::Reset` discards the
// steps of these batches, but it cannot stop threads that read or write the
// rows of the batches.
class BatchesInUse {
 public:
  // Adds a batch. A batch is in use as long as another object has a shared
  // pointer to the batch.
  void Add(const std::shared_ptr<const Batch>& batch);
  void Visit(const std::function<void(const Batch&)>& visit) const;

 private:
  std::vector<std::weak_ptr<const Batch>> batches_;
};

// The gradients of one replica's activations. Each feature has a gradient of
// shape [num_outputs, dim]. `keep_alive` owns the memory of the gradients. Each
// table has one element in `hyperparameters`, which is used if this replica
// completes the step and runs the update.
struct BatchGradients {
  std::vector<Span<const float>> features;
  std::vector<std::vector<float>> hyperparameters;
  std::shared_ptr<const void> keep_alive;
};

// The data for a table's backward pass that depends only on the ids. The engine
// computes it at enqueue, so that the update does not read the ids again:
//
//   unique row    rows      2        5     9
//   its positions splits    0        3     4        6
//   output row    gradient_of  0  4  1  | 0  | 2  7
//
// The output rows of a table are numbered by feature, and within each feature
// by replica. Therefore, the order of the positions is the order in which
// gradients are summed.
struct TableStep {
  std::vector<uint32_t> rows;
  std::vector<int64_t> splits;
  std::vector<uint32_t> gradient_of;
  std::vector<float> gains;  // If empty, all gains are 1.
};

// Computes the TableStep of one table. If `positions` is not null, it is set to
// the index of each position's id. The ids of the table are numbered in the
// same order as the output rows.
TableStep PrepareTable(const EngineConfig& config, int32_t table,
                       const std::vector<std::shared_ptr<const Batch>>& batches,
                       std::vector<uint32_t>* positions = nullptr,
                       const ParallelFor& parallel_for = SerialFor);

// Computes the TableStep of each table.
void PrepareTables(const EngineConfig& config,
                   const std::vector<std::shared_ptr<const Batch>>& batches,
                   const ParallelFor& parallel_for,
                   std::vector<TableStep>* tables);

// Returns an error if the shapes of the gradients do not match the shapes of
// the batch's activations.
Status CheckGradients(const EngineConfig& config, const Batch& batch,
                      const BatchGradients& gradients);

// Returns the gradient row of each output row, in the order of `TableStep`.
std::vector<const float*> GradientRows(
    const EngineConfig& config, int32_t table,
    const std::vector<BatchGradients>& gradients);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_STEPS_STEP_H_
