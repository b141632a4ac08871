// The host engine, which stores the steps in flight between enqueue, dequeue
// and apply_gradients.
//
// The engine owns the steps. The caller owns the rows and the slot variables,
// and passes them to each call. The calls of one replica must be sequential.
// Different replicas may call the engine concurrently. No call blocks. A call
// that is not valid in the current state returns an error and changes nothing.
// The error code is Code::kNotYet if a call by another thread can make the
// failed call valid.

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
  // The counts of one feature, summed over all batches.
  struct FeatureCounts {
    int64_t num_samples = 0;
    IdCounts ids;
  };
  // The counts of one table, summed over all training steps.
  struct TableCounts {
    int64_t num_lookups = 0;
    int64_t num_unique_rows = 0;
  };

  struct Description {
    // For each replica, the number of steps that wait for `Dequeue`.
    std::vector<int64_t> pending;
    // For each replica, whether its gradients are pending.
    std::vector<bool> awaiting;
    int64_t num_updates = 0;
    // The reason why all calls fail until `Reset`, or an empty string.
    std::string poisoned;
    // Whether a pipelined engine has deferred an update.
    bool is_held = false;
    std::vector<FeatureCounts> features;
    std::vector<TableCounts> tables;
  };

  // The arguments of the update of one table. The order of `slots` is the order
  // in which the optimizer lists its slot variables.
  struct TableViews {
    ShardedView<float> table;
    // Used instead of `table` if the table has 16-bit rows.
    ShardedView<uint16_t> half_table;
    // Number of earlier updates of this table. The stochastic rounding of
    // 16-bit rows depends on it.
    uint64_t num_updates = 0;
    std::vector<ShardedView<float>> slots;
    Span<const float> hyperparameters;
  };

  struct Step;

  static Status Make(EngineConfig config, std::unique_ptr<HostEngine>* engine);

  const EngineConfig& config() const { return config_; }

  // Checks a batch and appends it to the queue of the replica. In a training
  // step, the last replica that calls this function also finds the unique rows
  // of the step.
  template <typename Tid>
  Status Enqueue(int32_t replica, bool training,
                 const std::vector<FeatureInput<Tid>>& features,
                 const ParallelFor& parallel_for);

  // Enqueues a packed batch.
  Status Enqueue(int32_t replica, bool training, const PackedInput& input,
                 const ParallelFor& parallel_for);

  // Enqueues a batch that the caller has already checked. `made` is the status
  // that the check returned. If `made` is an error, the call fails in the same
  // way as `Enqueue` for an invalid batch.
  Status EnqueueBatch(int32_t replica, bool training, const Status& made,
                      std::shared_ptr<const Batch> batch,
                      const ParallelFor& parallel_for);

  // Removes the newest step from all queues, as if it had not been enqueued.
  // `batches` are the batches of all replicas. Returns an error if the batches
  // do not belong to the newest step, or if a replica has already started its
  // lookups for this step.
  Status TakeBackStep(const std::vector<std::shared_ptr<const Batch>>& batches);
  // Makes all later calls fail until `Reset`. The error message contains `why`.
  void Poison(const std::string& why);

  // Checks the ids of a batch and computes their rows and gains. If `owner` is
  // not null, the batch may refer to the ids and splits instead of copying them
  // (see `RaggedIds::MakeView`). Such a batch must not be used for training.
  template <typename Tid>
  Status MakeBatch(const std::vector<FeatureInput<Tid>>& features,
                   const ParallelFor& parallel_for,
                   std::shared_ptr<const Batch>* batch,
                   const std::shared_ptr<const void>& owner = nullptr) const;
  Status MakeBatch(const PackedInput& input, const ParallelFor& parallel_for,
                   std::shared_ptr<const Batch>* batch,
                   const std::shared_ptr<const void>& owner = nullptr) const;

  // These functions count the batches and updates of steps that TokenSteps
  // stores (cc/core/engine/token_steps.h), so that `Describe` includes them. If
  // `times` is -1, the batch is subtracted from the counts.
  void CountBatch(const Batch& batch, int64_t times = 1);
  void CountUpdate(const std::vector<TableStep>& tables);

  // Returns whether the queue of the replica has room for another step.
  bool HasRoom(int32_t replica) const;
  // Returns the error that `EnqueueBatch` would return for any batch of a new
  // step. Callers use this function to detect the error before they change
  // other state.
  Status CheckEnqueue(int32_t replica, bool training) const;
  // Calls `visit(batch)` for the batches of all steps in flight. Also visits
  // batches that a running call still uses after a reset discarded their step.
  void VisitInFlight(const std::function<void(const Batch&)>& visit) const;

  // Returns the oldest batch of the replica for a lookup. The batch stays in
  // the queue until `FinishDequeue(replica, true)` is called. After each
  // successful call of `BeginDequeue`, the caller must call `FinishDequeue`.
  Status BeginDequeue(int32_t replica, std::shared_ptr<const Batch>* batch);
  void FinishDequeue(int32_t replica, bool looked_up);

  // Returns the batch that a replica of a pipelined engine dequeues next, so
  // that the caller can look it up while the replica computes the gradients of
  // its current step. Until the replica passes these gradients, no update
  // changes the rows that the next step must read. `*batch` must be null, and
  // stays null if the next step is not enqueued or forward-only, or if the
  // deferred update has not been applied. The result of the lookup is valid
  // while `num_updates()` equals `*num_updates`.
  Status FindNext(int32_t replica, std::shared_ptr<const Batch>* batch,
                  int64_t* num_updates);
  int64_t num_updates() const;

  // Passes the replica's gradients for the step that the replica has dequeued.
  // `*update` must be null. The call of the last replica sets `*update` to the
  // step that the caller must pass to `Update` before it calls `FinishApply`. A
  // pipelined engine defers the update of the current step and sets `*update`
  // to the previously deferred step, if any. All other calls leave `*update`
  // null. If the update fails, the replica must pass its gradients again.
  Status BeginApply(int32_t replica, BatchGradients gradients,
                    std::shared_ptr<Step>* update);
  Status Update(const Step& step, const std::vector<TableViews>& tables,
                const RowKernels& kernels,
                const ParallelFor& parallel_for) const;
  void FinishApply(int32_t replica, bool updated);

  // Sets `*update` to the deferred update of a pipelined engine. The caller
  // must run this update and then call `FinishLanding`. `*update` must be null,
  // and stays null if no update is deferred. If `always` is false, `*update` is
  // set only if the next step of the replica is forward-only, because a
  // forward-only step must read the updated rows.
  Status BeginLanding(int32_t replica, bool always,
                      std::shared_ptr<Step>* update);
  void FinishLanding(bool updated);

  // Discards all steps in flight.
  void Reset();
  // Returns whether steps are in flight, or whether an update is deferred or
  // running.
  bool HasStepsInFlight() const;

  Description Describe() const;

 private:
  enum class Stage { kReady, kDequeuing, kAwaiting, kApplying };

  struct Replica {
    // Number of the next step that the replica enqueues.
    int64_t enqueued = 0;
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
  // If `times` is -1, the batch is subtracted from the counts.
  void CountBatchLocked(const Batch& batch, int64_t times = 1);
  void CountRowsLocked(const std::vector<TableStep>& tables, int64_t times = 1);
  bool IsUpdating() const;
  void HandOut(const std::shared_ptr<Step>& update);

  const EngineConfig config_;
  // Guards the members below.
  mutable std::mutex mutex_;
  std::vector<Replica> replicas_;
  // The steps in flight, ordered from oldest to newest.
  std::deque<std::shared_ptr<Step>> steps_;
  // Number of the step `steps_.front()`.
  int64_t first_number_ = 0;
  int64_t num_updates_ = 0;
  std::string poisoned_;
  // The step whose update is deferred, or null.
  std::shared_ptr<Step> held_;
  BatchesInUse in_use_;
  bool is_landing_ = false;
  std::vector<FeatureCounts> feature_counts_;
  std::vector<TableCounts> table_counts_;
};

// All members except `tables` are written while the mutex of the engine is
// held. `tables` is written once, before the replica that completes the step
// can dequeue its batch.
struct HostEngine::Step {
  bool training = true;
  // One batch per replica. For token steps, one batch per lookup and replica,
  // ordered by lookup.
  std::vector<std::shared_ptr<const Batch>> batches;
  std::vector<bool> published;  // One value per replica.
  int32_t num_enqueued = 0;
  // Number of replicas that do not need this step any more.
  int32_t num_finished = 0;
  std::vector<TableStep> tables;
  std::vector<BatchGradients> gradients;  // In the order of `batches`.
  // For token steps, the factor of each element of `gradients`.
  std::vector<float> factors;
  // The hyperparameters of each table.
  std::vector<std::vector<float>> hyperparameters;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_ENGINE_HOST_ENGINE_H_
