#include "cc/core/engine/host_engine.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/ids/packed_ids.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"

namespace layoutmap {
using std::to_string;

HostEngine::HostEngine(EngineConfig config)
    : config_(std::move(config)),
      replicas_(config_.num_replicas),
      feature_counts_(config_.features.size()),
      table_counts_(config_.tables.size()) {}

Status HostEngine::Make(EngineConfig config,
                        std::unique_ptr<HostEngine>* engine) {
  LM_RETURN_IF_ERROR(CheckConfig(config));
  engine->reset(new HostEngine(std::move(config)));
  return Status();
}

Status HostEngine::CheckCall(int32_t replica) const {
  if (replica < 0 || replica >= config_.num_replicas) {
    return InvalidArgument("`replica` must be in [0, " +
                           to_string(config_.num_replicas) +
                           "). Received: " + to_string(replica));
  }
  if (!poisoned_.empty()) {
    return FailedPrecondition(
        "The replicas no longer agree about their steps since " + poisoned_ +
        ". Call `reset` to discard the steps in flight");
  }
  return Status();
}

std::shared_ptr<HostEngine::Step> HostEngine::StepAt(int64_t number) const {
  const int64_t i = number - first_number_;
  // The index is negative if a reset has discarded the step since the call
  // began.
  const bool here = i >= 0 && i < static_cast<int64_t>(steps_.size());
  return here ? steps_[i] : nullptr;
}

void HostEngine::DropFinishedSteps() {
  while (!steps_.empty() &&
         steps_.front()->num_finished == config_.num_replicas) {
    steps_.pop_front();
    ++first_number_;
  }
}

void HostEngine::CountBatch(const Batch& batch, int64_t times) {
  std::lock_guard<std::mutex> lock(mutex_);
  CountBatchLocked(batch, times);
}

void HostEngine::CountUpdate(const std::vector<TableStep>& tables) {
  std::lock_guard<std::mutex> lock(mutex_);
  CountRowsLocked(tables);
  ++num_updates_;
}

void HostEngine::CountRowsLocked(const std::vector<TableStep>& tables,
                                 int64_t times) {
  for (size_t t = 0; t < tables.size(); ++t) {
    table_counts_[t].num_lookups +=
        times * static_cast<int64_t>(tables[t].gradient_of.size());
    table_counts_[t].num_unique_rows +=
        times * static_cast<int64_t>(tables[t].rows.size());
  }
}

void HostEngine::CountBatchLocked(const Batch& batch, int64_t times) {
  for (size_t f = 0; f < batch.size(); ++f) {
    const IdCounts& counts = batch[f].counts();
    FeatureCounts& total = feature_counts_[f];
    total.num_samples += times * batch[f].num_samples();
    total.ids.num_ids += times * counts.num_ids;
    total.ids.num_dropped += times * counts.num_dropped;
    total.ids.num_clipped += times * counts.num_clipped;
    total.ids.num_truncated += times * counts.num_truncated;
  }
}

bool HostEngine::IsUpdating() const {
  bool is_updating = is_landing_;
  for (const Replica& r : replicas_) {
    is_updating |= r.stage == Stage::kApplying;
  }
  return is_updating;
}

template <typename Tid>
Status HostEngine::MakeBatch(const std::vector<FeatureInput<Tid>>& features,
                             const ParallelFor& parallel_for,
                             std::shared_ptr<const Batch>* batch,
                             const std::shared_ptr<const void>& owner) const {
  if (features.size() != config_.features.size()) {
    return InvalidArgument(
        "A batch must have " + to_string(config_.features.size()) +
        " features. Received: " + to_string(features.size()));
  }
  auto made = std::make_shared<Batch>(features.size());
  std::vector<Status> statuses(features.size());
  int64_t num_ids = 0;
  // The cost estimate uses the sizes of the inputs, because `num_samples` is
  // not checked yet.
  for (const FeatureInput<Tid>& feature : features) {
    num_ids += static_cast<int64_t>(feature.ids.size() + feature.splits.size());
  }
  const int64_t num_features = static_cast<int64_t>(features.size());
  // Without a copy, the check takes about 1 ns per id and per row split.
  // Otherwise, it takes about 4 ns.
  const int64_t cost = owner == nullptr ? 4 : 1;
  parallel_for(num_features, 1 + cost * num_ids / num_features,
               [&](int64_t begin, int64_t end) {
                 for (int64_t f = begin; f < end; ++f) {
                   RaggedIds& ids = (*made)[f];
                   const FeatureSpec& spec = config_.features[f];
                   if (owner != nullptr &&
                       RaggedIds::MakeView(spec, features[f], owner, &ids)) {
                     continue;
                   }
                   statuses[f] = RaggedIds::Make(spec, features[f], &ids);
                 }
               });
  // Returns the error of the first invalid feature, so that the result does not
  // depend on the order of the threads.
  for (const Status& status : statuses) LM_RETURN_IF_ERROR(status);
  *batch = std::move(made);
  return Status();
}

Status HostEngine::MakeBatch(const PackedInput& input,
                             const ParallelFor& parallel_for,
                             std::shared_ptr<const Batch>* batch,
                             const std::shared_ptr<const void>& owner) const {
  auto made = std::make_shared<Batch>();
  const bool is_simple = std::all_of(
      config_.tables.begin(), config_.tables.end(), [](const TableSpec& table) {
        return table.partition.num_shards() == 1 && !table.is_quantized;
      });
  if (owner != nullptr && is_simple &&
      ViewPackedIds(config_.features, input, owner, parallel_for, made.get())) {
    *batch = std::move(made);
    return Status();
  }
  UnpackedIds unpacked;
  LM_RETURN_IF_ERROR(
      UnpackedIds::Make(config_.features, input, parallel_for, &unpacked));
  if (unpacked.TakeRows(config_.features, parallel_for, made.get())) {
    *batch = std::move(made);
    return Status();
  }
  return MakeBatch(unpacked.features(), parallel_for, batch);
}

Status HostEngine::CheckRoom(int32_t replica, bool training) const {
  const Replica& r = replicas_[replica];
  if (r.enqueued - r.dequeued >= config_.max_pending_steps) {
    return FailedPrecondition(to_string(r.enqueued - r.dequeued) +
                              " steps are enqueued already (replica " +
                              to_string(replica) + "); call `dequeue` first");
  }
  for (const TableSpec& table : config_.tables) {
    if (training && table.optimizer == Optimizer::kNone) {
      return FailedPrecondition("Table '" + table.name +
                                "' has no optimizer: enqueue with "
                                "training=False");
    }
  }
  return Status();
}

Status HostEngine::CheckEnqueue(int32_t replica, bool training) const {
  std::lock_guard<std::mutex> lock(mutex_);
  LM_RETURN_IF_ERROR(CheckCall(replica));
  return CheckRoom(replica, training);
}

void HostEngine::VisitInFlight(
    const std::function<void(const Batch&)>& visit) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto visit_step = [&](const Step& step) {
    for (const std::shared_ptr<const Batch>& batch : step.batches) {
      if (batch != nullptr) visit(*batch);
    }
  };
  for (const std::shared_ptr<Step>& step : steps_) visit_step(*step);
  if (held_ != nullptr) visit_step(*held_);
  in_use_.Visit(visit);
}

Status HostEngine::Publish(int32_t replica, bool training,
                           std::shared_ptr<const Batch> batch,
                           std::shared_ptr<Step>* complete) {
  LM_RETURN_IF_ERROR(CheckRoom(replica, training));
  Replica& r = replicas_[replica];
  std::shared_ptr<Step> step = StepAt(r.enqueued);
  if (step == nullptr) {
    step = std::make_shared<Step>();
    step->training = training;
    step->batches.resize(config_.num_replicas);
    step->published.resize(config_.num_replicas);
    step->gradients.resize(config_.num_replicas);
    steps_.push_back(step);
  } else if (step->training != training) {
    return FailedPrecondition(
        "All replicas must enqueue a step with the same `training`. "
        "Received: " +
        std::string(training ? "True" : "False") + " from replica " +
        to_string(replica) + ", step " + to_string(r.enqueued));
  }
  ++r.enqueued;
  step->batches[replica] = std::move(batch);
  if (++step->num_enqueued == config_.num_replicas) *complete = step;
  return Status();
}

template <typename Tid>
Status HostEngine::Enqueue(int32_t replica, bool training,
                           const std::vector<FeatureInput<Tid>>& features,
                           const ParallelFor& parallel_for) {
  std::shared_ptr<const Batch> batch;
  const Status made = MakeBatch(features, parallel_for, &batch);
  return EnqueueBatch(replica, training, made, std::move(batch), parallel_for);
}

Status HostEngine::Enqueue(int32_t replica, bool training,
                           const PackedInput& input,
                           const ParallelFor& parallel_for) {
  std::shared_ptr<const Batch> batch;
  const Status made = MakeBatch(input, parallel_for, &batch);
  return EnqueueBatch(replica, training, made, std::move(batch), parallel_for);
}

bool HostEngine::HasRoom(int32_t replica) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (replica < 0 || replica >= config_.num_replicas) return false;
  const Replica& r = replicas_[replica];
  return r.enqueued - r.dequeued < config_.max_pending_steps;
}

Status HostEngine::EnqueueBatch(int32_t replica, bool training,
                                const Status& made,
                                std::shared_ptr<const Batch> batch,
                                const ParallelFor& parallel_for) {
  std::shared_ptr<Step> complete;
  int64_t number;
  Status status = made;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    LM_RETURN_IF_ERROR(CheckCall(replica));
    number = replicas_[replica].enqueued;
    if (status.ok()) status = Publish(replica, training, batch, &complete);
    if (!status.ok()) {
      // The engine must be reset. Otherwise, the next batch of this replica
      // would be combined with the batches that other replicas have enqueued
      // for the failed step.
      if (config_.num_replicas > 1) {
        poisoned_ = "replica " + to_string(replica) +
                    " failed to enqueue step " + to_string(number) + " (" +
                    status.message() + ")";
      }
      return status;
    }
  }

  if (complete != nullptr && training) {
    PrepareTables(config_, complete->batches, parallel_for, &complete->tables);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  // Another thread may have reset the engine during the lookup, which discards
  // the step.
  std::shared_ptr<Step> step = StepAt(number);
  if (step != nullptr && step->batches[replica] == batch) {
    step->published[replica] = true;
  }
  CountBatchLocked(*batch);
  if (complete != nullptr) CountRowsLocked(complete->tables);
  return Status();
}

Status HostEngine::TakeBackStep(
    const std::vector<std::shared_ptr<const Batch>>& batches) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t number =
      first_number_ + static_cast<int64_t>(steps_.size()) - 1;
  bool is_waiting = !steps_.empty() && steps_.back()->batches == batches;
  for (const Replica& r : replicas_) {
    is_waiting = is_waiting && r.enqueued == number + 1 &&
                 (r.dequeued < number ||
                  (r.dequeued == number && r.stage != Stage::kDequeuing));
  }
  if (!is_waiting) {
    return FailedPrecondition(
        "Only the newest step can be taken back, and only before it is "
        "dequeued. Received: a step that another call has dequeued or reset, "
        "or that is followed by another step");
  }
  for (const std::shared_ptr<const Batch>& batch : batches) {
    CountBatchLocked(*batch, -1);
  }
  CountRowsLocked(steps_.back()->tables, -1);
  steps_.pop_back();
  for (Replica& r : replicas_) r.enqueued = number;
  return Status();
}

void HostEngine::Poison(const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  poisoned_ = why;
}

Status HostEngine::BeginDequeue(int32_t replica,
                                std::shared_ptr<const Batch>* batch) {
  std::lock_guard<std::mutex> lock(mutex_);
  LM_RETURN_IF_ERROR(CheckCall(replica));
  Replica& r = replicas_[replica];
  const std::string step_name = "step " + to_string(r.dequeued - 1);
  if (r.stage == Stage::kAwaiting) {
    return FailedPrecondition(
        "`dequeue` of replica " + to_string(replica) + ": " + step_name +
        " still awaits its gradients; call `apply_gradients` first, or enqueue "
        "with training=False if there will be none");
  }
  if (r.stage != Stage::kReady) {
    return NotYet("`dequeue` of replica " + to_string(replica) +
                  " while another call of it runs");
  }
  std::shared_ptr<Step> step = StepAt(r.dequeued);
  if (step == nullptr || !step->published[replica]) {
    return NotYet(
        "`dequeue` needs an enqueued step; call `enqueue` first (replica " +
        to_string(replica) + ")");
  }
  // An unfinished earlier training step waits for the gradients of other
  // replicas.
  for (int64_t number = first_number_; number < r.dequeued; ++number) {
    if (!StepAt(number)->training) continue;
    return NotYet("`dequeue` of replica " + to_string(replica) +
                  ": the update of step " + to_string(number) +
                  " still waits for the gradients of another replica");
  }
  if (held_ != nullptr && (is_landing_ || !step->training)) {
    return NotYet(
        "`dequeue` of replica " + to_string(replica) +
        ": the deferred update must be applied before a forward-only step is "
        "looked up");
  }
  r.stage = Stage::kDequeuing;
  *batch = step->batches[replica];
  in_use_.Add(*batch);
  return Status();
}

void HostEngine::FinishDequeue(int32_t replica, bool looked_up) {
  std::lock_guard<std::mutex> lock(mutex_);
  Replica& r = replicas_[replica];
  if (r.stage != Stage::kDequeuing) return;  // The engine was reset.
  r.stage = Stage::kReady;
  if (!looked_up) return;
  std::shared_ptr<Step> step = StepAt(r.dequeued++);
  r.last_was_training = step->training;
  if (step->training) {
    r.stage = Stage::kAwaiting;
  } else {
    ++step->num_finished;
    DropFinishedSteps();
  }
}

Status HostEngine::FindNext(int32_t replica,
                            std::shared_ptr<const Batch>* batch,
                            int64_t* num_updates) {
  std::lock_guard<std::mutex> lock(mutex_);
  LM_RETURN_IF_ERROR(CheckCall(replica));
  const Replica& r = replicas_[replica];
  // All steps before the current step must be updated.
  const bool is_only_current = first_number_ == r.dequeued - 1;
  if (!config_.is_pipelined || r.stage != Stage::kAwaiting ||
      !is_only_current || held_ != nullptr || IsUpdating()) {
    return Status();
  }
  const std::shared_ptr<Step> next = StepAt(r.dequeued);
  if (next == nullptr || !next->training || !next->published[replica]) {
    return Status();
  }
  *batch = next->batches[replica];
  *num_updates = num_updates_;
  in_use_.Add(*batch);
  return Status();
}

int64_t HostEngine::num_updates() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_updates_;
}

void HostEngine::Reset() {
  std::lock_guard<std::mutex> lock(mutex_);
  // New steps get numbers after the last number in use. Otherwise, a call that
  // began before the reset could use a new step.
  int64_t next = first_number_ + static_cast<int64_t>(steps_.size());
  steps_.clear();
  first_number_ = next;
  for (Replica& r : replicas_) {
    r = Replica();
    r.enqueued = r.dequeued = next;
  }
  poisoned_.clear();
  held_ = nullptr;
  is_landing_ = false;
}

bool HostEngine::HasStepsInFlight() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !steps_.empty() || held_ != nullptr || IsUpdating();
}

HostEngine::Description HostEngine::Describe() const {
  std::lock_guard<std::mutex> lock(mutex_);
  Description d;
  for (const Replica& r : replicas_) {
    d.pending.push_back(r.enqueued - r.dequeued);
    d.awaiting.push_back(r.stage == Stage::kAwaiting);
  }
  d.num_updates = num_updates_;
  d.poisoned = poisoned_;
  d.is_held = held_ != nullptr;
  d.features = feature_counts_;
  d.tables = table_counts_;
  return d;
}

template Status HostEngine::MakeBatch<int32_t>(
    const std::vector<FeatureInput<int32_t>>&, const ParallelFor&,
    std::shared_ptr<const Batch>*, const std::shared_ptr<const void>&) const;
template Status HostEngine::MakeBatch<int64_t>(
    const std::vector<FeatureInput<int64_t>>&, const ParallelFor&,
    std::shared_ptr<const Batch>*, const std::shared_ptr<const void>&) const;
template Status HostEngine::Enqueue<int32_t>(
    int32_t, bool, const std::vector<FeatureInput<int32_t>>&,
    const ParallelFor&);
template Status HostEngine::Enqueue<int64_t>(
    int32_t, bool, const std::vector<FeatureInput<int64_t>>&,
    const ParallelFor&);

}  // namespace layoutmap
