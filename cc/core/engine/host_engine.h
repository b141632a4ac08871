// The engine: steps in flight between enqueue, dequeue and apply_gradients.
//
// It owns the steps and nothing else; rows and slot variables are the caller's
// and come with each call. Calls of one replica follow each other; different
// replicas may call at the same time. No call waits for another: one that comes
// at the wrong time is refused, and changes nothing: with Code::kNotYet where
// a call of another thread may still make it right.

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
  // Of all batches there were.
  struct FeatureCounts {
    int64_t num_samples = 0;
    IdCounts ids;
  };
  // Of all training steps there were.
  struct TableCounts {
    int64_t num_lookups = 0;
    int64_t num_unique_rows = 0;
  };

  struct Description {
    std::vector<int64_t> pending;  // by replica: steps that wait for a dequeue
    std::vector<bool> awaiting;    // by replica: gradients are awaited
    int64_t num_updates = 0;
    std::string poisoned;  // why everything is refused until Reset, or empty
    bool is_held = false;  // an update waits to land (pipelined)
    std::vector<FeatureCounts> features;
    std::vector<TableCounts> tables;
  };

  // What one table's update works on; slots as its optimizer orders them.
  struct TableViews {
    ShardedView<float> table;
    ShardedView<uint16_t> half_table;  // instead, if it has 16-bit rows
    // Updates of this table so far; what 16-bit rows are rounded by depends on
    // it.
    uint64_t num_updates = 0;
    std::vector<ShardedView<float>> slots;
    Span<const float> hyperparameters;
  };

  struct Step;

  static Status Make(EngineConfig config, std::unique_ptr<HostEngine>* engine);

  const EngineConfig& config() const { return config_; }

  // Checks a batch and puts it at the end of the replica's queue. The last
  // replica of a training step also finds the unique rows.
  template <typename Tid>
  Status Enqueue(int32_t replica, bool training,
                 const std::vector<FeatureInput<Tid>>& features,
                 const ParallelFor& parallel_for);

  // The same of a packed batch.
  Status Enqueue(int32_t replica, bool training, const PackedInput& input,
                 const ParallelFor& parallel_for);

  // The same of a batch that the caller has checked; `made` is what came of it,
  // and refused here if it failed.
  Status EnqueueBatch(int32_t replica, bool training, const Status& made,
                      std::shared_ptr<const Batch> batch,
                      const ParallelFor& parallel_for);

  // Takes the newest step out of all queues, as if it had never been enqueued.
  // `batches` are those of all replicas; refused unless they are the newest
  // step and no replica has begun to look it up.
  Status TakeBackStep(const std::vector<std::shared_ptr<const Batch>>& batches);
  // Refuses every later call until `Reset`, for the reason `why`.
  void Poison(const std::string& why);

  // Checks the ids of a batch and finds their rows and gains.
  template <typename Tid>
  Status MakeBatch(const std::vector<FeatureInput<Tid>>& features,
                   const ParallelFor& parallel_for,
                   std::shared_ptr<const Batch>* batch) const;
  Status MakeBatch(const PackedInput& input, const ParallelFor& parallel_for,
                   std::shared_ptr<const Batch>* batch) const;

  // For steps that are kept elsewhere (cc/core/engine/token_steps.h): what
  // `Describe` tells of batches and updates. `times` is -1 for what is taken
  // back.
  void CountBatch(const Batch& batch, int64_t times = 1);
  void CountUpdate(const std::vector<TableStep>& tables);

  // Whether the replica's queue takes another step.
  bool HasRoom(int32_t replica) const;
  // What `EnqueueBatch` would say of any batch of a step that no replica has
  // begun, before something is done for it.
  Status CheckEnqueue(int32_t replica, bool training) const;
  // Calls `visit(batch)` for the batches of all steps in flight, and of what
  // runs now though a reset has forgotten its step.
  void VisitInFlight(const std::function<void(const Batch&)>& visit) const;

  // The replica's oldest batch, to look up; it stays in the queue until
  // `FinishDequeue(replica, true)`. Each Begin that is ok needs its Finish.
  Status BeginDequeue(int32_t replica, std::shared_ptr<const Batch>* batch);
  void FinishDequeue(int32_t replica, bool looked_up);

  // Hands in the gradients of the replica's dequeued step. The last replica
  // gets the step in `update` (the others null) and must run `Update` and then
  // `FinishApply`; if it failed, its gradients are awaited again. A pipelined
  // engine hands out the step before instead, if there is one, and holds this
  // one back.
  Status BeginApply(int32_t replica, BatchGradients gradients,
                    std::shared_ptr<Step>* update);
  Status Update(const Step& step, const std::vector<TableViews>& tables,
                const RowKernels& kernels,
                const ParallelFor& parallel_for) const;
  void FinishApply(int32_t replica, bool updated);

  // Hands out the update that a pipelined engine holds back, or null if there
  // is none; it must be run, and then `FinishLanding`. With `always` false only
  // if the replica's next step is forward-only: that one must see the update.
  Status BeginLanding(int32_t replica, bool always,
                      std::shared_ptr<Step>* update);
  void FinishLanding(bool updated);

  // Forgets every step in flight.
  void Reset();
  // Whether there is one, or an update that is held back or runs.
  bool HasStepsInFlight() const;

  Description Describe() const;

 private:
  enum class Stage { kReady, kDequeuing, kAwaiting, kApplying };

  struct Replica {
    int64_t enqueued = 0;  // the number of the step that comes next
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
  // `times` is -1 for what is taken back.
  void CountBatchLocked(const Batch& batch, int64_t times = 1);
  void CountRowsLocked(const std::vector<TableStep>& tables, int64_t times = 1);
  bool IsUpdating() const;
  void HandOut(const std::shared_ptr<Step>& update);

  const EngineConfig config_;
  mutable std::mutex mutex_;  // guards all below
  std::vector<Replica> replicas_;
  std::deque<std::shared_ptr<Step>> steps_;  // oldest first
  int64_t first_number_ = 0;                 // of steps_.front()
  int64_t num_updates_ = 0;
  std::string poisoned_;
  std::shared_ptr<Step> held_;  // all gradients are there, the update is not
  BatchesInUse in_use_;
  bool is_landing_ = false;
  std::vector<FeatureCounts> feature_counts_;
  std::vector<TableCounts> table_counts_;
};

// Written under the engine's mutex, but for `tables`: that is written once,
// before the batch of the replica that completes the step can be dequeued.
struct HostEngine::Step {
  bool training = true;
  // By replica; of token steps by lookup, then by replica, as the gradients.
  std::vector<std::shared_ptr<const Batch>> batches;
  std::vector<bool> published;  // by replica
  int32_t num_enqueued = 0;
  int32_t num_finished = 0;  // replicas that need nothing more of this step
  std::vector<TableStep> tables;
  std::vector<BatchGradients> gradients;  // by replica
  std::vector<float> factors;             // of the gradients of token steps
  std::vector<std::vector<float>> hyperparameters;  // by table
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_ENGINE_HOST_ENGINE_H_
