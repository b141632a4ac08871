// The engine: steps in flight between enqueue, dequeue and apply_gradients.
//
// It owns the steps; rows and slot variables are owned by the caller and passed
// to each call. The calls of one replica must be sequential; different replicas
// may call concurrently. No call blocks. A call that is not valid in the
// current state returns an error and changes nothing. The error is
// Code::kNotYet if a call of another thread may make it valid.

#ifndef TF_LAYOUTMAP_CORE_ENGINE_HOST_ENGINE_H_
#define TF_LAYOUTMAP_CORE_ENGINE_HOST_ENGINE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/packed_ids.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"
#include "cc/core/tables/sharded_view.h"

namespace layoutmap {

class HostEngine {
 public:
  // Totals over all batches.
  struct FeatureCounts {
    int64_t num_samples = 0;
    IdCounts ids;
  };
  // Totals over all training steps.
  struct TableCounts {
    int64_t num_lookups = 0;
    int64_t num_unique_rows = 0;
  };

  struct Description {
    std::vector<int64_t> pending;  // by replica: steps that wait for a dequeue
    std::vector<bool> awaiting;    // by replica: whether gradients are pending
    int64_t num_updates = 0;
    std::string poisoned;  // reason why all calls fail until Reset, or empty
    bool is_held = false;  // whether an update is deferred (pipelined)
    std::vector<FeatureCounts> features;
    std::vector<TableCounts> tables;
  };

  // The arguments of one table's update. Slots are in the order of the
  // optimizer.
  struct TableViews {
    ShardedView<float> table;
    ShardedView<uint16_t> half_table;  // replaces `table` for 16-bit rows
    // Number of earlier updates of this table, which determines the rounding of
    // 16-bit rows.
    uint64_t num_updates = 0;
    std::vector<ShardedView<float>> slots;
    Span<const float> hyperparameters;
  };

  struct Step;

  static Status Make(EngineConfig config, std::unique_ptr<HostEngine>* engine);

  const EngineConfig& config() const { return config_; }

  // Checks a batch and appends it to the queue of the replica. The call of the
  // last replica of a training step also finds the unique rows.
  template <typename Tid>
  Status Enqueue(int32_t replica, bool training,
                 const std::vector<FeatureInput<Tid>>& features,
                 const ParallelFor& parallel_for);

  // Enqueues a packed batch.
  Status Enqueue(int32_t replica, bool training, const PackedInput& input,
                 const ParallelFor& parallel_for);

  // Enqueues a batch that the caller has checked. `made` is the result of the
  // check. If it is an error, the call fails in the same way as `Enqueue` for
  // an invalid batch.
  Status EnqueueBatch(int32_t replica, bool training, const Status& made,
                      std::shared_ptr<const Batch> batch,
                      const ParallelFor& parallel_for);

  // Removes the newest step from all queues, as if it had not been enqueued.
  // `batches` are the batches of all replicas. Returns an error unless they
  // belong to the newest step and no replica has begun to look it up.
  Status TakeBackStep(const std::vector<std::shared_ptr<const Batch>>& batches);
  // Makes all later calls fail until `Reset`. `why` is the reason for the
  // message.
  void Poison(const std::string& why);

  // Checks the ids of a batch and computes their rows and gains.
  template <typename Tid>
  Status MakeBatch(const std::vector<FeatureInput<Tid>>& features,
                   const ParallelFor& parallel_for,
                   std::shared_ptr<const Batch>* batch) const;
  Status MakeBatch(const PackedInput& input, const ParallelFor& parallel_for,
                   std::shared_ptr<const Batch>* batch) const;

  // Count batches and updates of steps that are stored elsewhere
  // (cc/core/engine/token_steps.h), so that `Describe` includes them. `times`
  // is -1 for a batch that is taken back.
  void CountBatch(const Batch& batch, int64_t times = 1);
  void CountUpdate(const std::vector<TableStep>& tables);

  // Returns whether the queue of the replica has room for another step.
  bool HasRoom(int32_t replica) const;
  // Returns the error that `EnqueueBatch` would return for any batch of a new
  // step. Callers use it before they change other state.
  Status CheckEnqueue(int32_t replica, bool training) const;
  // Calls `visit(batch)` for the batches of all steps in flight, and of running
  // calls whose step was discarded by a reset.
  void VisitInFlight(const std::function<void(const Batch&)>& visit) const;

  // Returns the oldest batch of the replica for a lookup. It stays in the queue
  // until `FinishDequeue(replica, true)`. Each successful call requires a call
  // of `FinishDequeue`.
  Status BeginDequeue(int32_t replica, std::shared_ptr<const Batch>* batch);
  void FinishDequeue(int32_t replica, bool looked_up);

  // Passes the gradients of the dequeued step of the replica. The call of the
  // last replica sets `update` to the step; the calls of other replicas set it
  // to null. The caller must then run `Update` and `FinishApply`. If the update
  // fails, the gradients of this replica are pending again. A pipelined engine
  // returns the preceding step instead, if there is one, and defers this step.
  Status BeginApply(int32_t replica, BatchGradients gradients,
                    std::shared_ptr<Step>* update);
  Status Update(const Step& step, const std::vector<TableViews>& tables,
                const RowKernels& kernels,
                const ParallelFor& parallel_for) const;
  void FinishApply(int32_t replica, bool updated);

  // Sets `update` to the deferred update of a pipelined engine, or to null if
  // there is none. The caller must run it and call `FinishLanding`. If `always`
  // is false, the update is only returned if the next step of the replica is
  // forward-only, because that step must use the updated rows.
  Status BeginLanding(int32_t replica, bool always,
                      std::shared_ptr<Step>* update);
  void FinishLanding(bool updated);

  // Discards all steps in flight.
  void Reset();
  // Returns whether there are steps in flight, or an update that is deferred or
  // running.
  bool HasStepsInFlight() const;

  Description Describe() const;

 private:
  enum class Stage { kReady, kDequeuing, kAwaiting, kApplying };

  struct Replica {
    int64_t enqueued = 0;  // number of the next step
    int64_t dequeued = 0;
    Stage stage = Stage::kReady;
    bool last_was_training = true;
  };

  explicit HostEngine(EngineConfig config);

  Status CheckCall(int32_t replica) const;
  Status CheckRoom(int32_t replica, bool training) const;
  Status Publish(int32_t replica, bool training,
                 std::shared_ptr<const Batch> batch,
                 std::shared_ptr<Step>* complete);
  std::shared_ptr<Step> StepAt(int64_t number) const;
  void DropFinishedSteps();
  // `times` is -1 for a batch that is taken back.
  void CountBatchLocked(const Batch& batch, int64_t times = 1);
  void CountRowsLocked(const std::vector<TableStep>& tables, int64_t times = 1);
  bool IsUpdating() const;
  void HandOut(const std::shared_ptr<Step>& update);

  const EngineConfig config_;
  mutable std::mutex mutex_;  // guards the members below
  std::vector<Replica> replicas_;
  std::deque<std::shared_ptr<Step>> steps_;  // oldest first
  int64_t first_number_ = 0;                 // number of steps_.front()
  int64_t num_updates_ = 0;
  std::string poisoned_;
  std::shared_ptr<Step> held_;  // step whose update is deferred
  BatchesInUse in_use_;
  bool is_landing_ = false;
  std::vector<FeatureCounts> feature_counts_;
  std::vector<TableCounts> table_counts_;
};

// Written under the mutex of the engine, except for `tables`, which is written
// once, before the batch of the replica that completes the step can be
// dequeued.
struct HostEngine::Step {
  bool training = true;
  // By replica. For token steps: by lookup, then by replica, like the
  // gradients.
  std::vector<std::shared_ptr<const Batch>> batches;
  std::vector<bool> published;  // by replica
  int32_t num_enqueued = 0;
  int32_t num_finished = 0;  // replicas that do not need this step any more
  std::vector<TableStep> tables;
  std::vector<BatchGradients> gradients;  // by replica
  std::vector<float> factors;  // factors of the gradients of token steps
  std::vector<std::vector<float>> hyperparameters;  // by table
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_ENGINE_HOST_ENGINE_H_
