// The part of the engine that receives gradients and returns updates.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/status.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/optimizers/apply.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"
#include "cc/core/tables/half_table.h"

namespace layoutmap {

using std::to_string;

void HostEngine::HandOut(const std::shared_ptr<Step>& update) {
  for (const std::shared_ptr<const Batch>& batch : update->batches) {
    in_use_.Add(batch);
  }
}

Status HostEngine::BeginApply(int32_t replica, BatchGradients gradients,
                              std::shared_ptr<Step>* update) {
  std::lock_guard<std::mutex> lock(mutex_);
  LM_RETURN_IF_ERROR(CheckCall(replica));
  Replica& r = replicas_[replica];
  if (r.stage != Stage::kAwaiting) {
    return FailedPrecondition(
        r.last_was_training
            ? "`apply_gradients` needs a dequeued step; call `enqueue` and "
              "`dequeue` first (replica " +
                  to_string(replica) + ")"
            : "`apply_gradients` of replica " + to_string(replica) +
                  " after a forward-only step, which needs no gradients (a TPU "
                  "would wait forever): it was enqueued with training=False, "
                  "or by a tf.function that dequeues it too and does not apply "
                  "in the same function and under the same name");
  }
  std::shared_ptr<Step> step = StepAt(r.dequeued - 1);
  LM_RETURN_IF_ERROR(
      CheckGradients(config_, *step->batches[replica], gradients));
  const bool is_last = step->num_finished + 1 == config_.num_replicas;
  if (is_last && IsUpdating()) {
    return NotYet("`apply_gradients` of replica " + to_string(replica) +
                  " while another update is applied");
  }
  if (is_last) step->hyperparameters = std::move(gradients.hyperparameters);
  step->gradients[replica] = std::move(gradients);
  if (is_last && config_.is_pipelined && held_ == nullptr) {
    held_ = step;
    r.stage = Stage::kReady;
    ++step->num_finished;
    DropFinishedSteps();
  } else if (is_last) {
    r.stage = Stage::kApplying;
    *update = config_.is_pipelined ? held_ : step;
    HandOut(*update);
  } else {
    r.stage = Stage::kReady;
    ++step->num_finished;
  }
  return Status();
}

Status HostEngine::Update(const Step& step,
                          const std::vector<TableViews>& tables,
                          const RowKernels& kernels,
                          const ParallelFor& parallel_for) const {
  for (size_t t = 0; t < tables.size(); ++t) {
    LM_RETURN_IF_ERROR(CheckHyperparameters(config_.tables[t].optimizer,
                                            config_.tables[t].name,
                                            tables[t].hyperparameters));
  }
  std::vector<std::vector<const float*>> gradient_rows(tables.size());
  // The loop sets one pointer per output row, which takes a few microseconds
  // per table.
  parallel_for(static_cast<int64_t>(tables.size()), 10000,
               [&](int64_t begin, int64_t end) {
                 for (int64_t t = begin; t < end; ++t) {
                   gradient_rows[t] = GradientRows(
                       config_, static_cast<int32_t>(t), step.gradients);
                 }
               });
  std::vector<HalfTable> half_tables(tables.size());
  std::vector<TableUpdate> updates(tables.size());
  for (size_t t = 0; t < tables.size(); ++t) {
    const TableStep& ids = step.tables[t];
    const TableSpec& spec = config_.tables[t];
    TableUpdate& update = updates[t];
    update.optimizer = spec.optimizer;
    update.hyperparameters = tables[t].hyperparameters;
    update.gradients.rows = ids.rows;
    update.gradients.splits = ids.splits;
    update.gradients.gradient_of = ids.gradient_of;
    update.gradients.gains = ids.gains;
    update.gradients.gradient_rows = gradient_rows[t];
    update.slots = tables[t].slots;
    if (spec.row_type == RowType::kFloat32) {
      update.table = &tables[t].table;
      continue;
    }
    half_tables[t].rows = tables[t].half_table;
    half_tables[t].type = spec.row_type;
    half_tables[t].first_row = spec.first_row;
    half_tables[t].noise_key =
        NoiseKey(config_.rounding_seed, t, tables[t].num_updates);
    update.half_table = &half_tables[t];
  }
  ApplyGradientsToAll(updates, kernels, parallel_for);
  return Status();
}

void HostEngine::FinishApply(int32_t replica, bool updated) {
  std::lock_guard<std::mutex> lock(mutex_);
  Replica& r = replicas_[replica];
  if (r.stage != Stage::kApplying) return;  // The engine was reset.
  std::shared_ptr<Step> step = StepAt(r.dequeued - 1);
  if (!updated) {
    r.stage = Stage::kAwaiting;
    step->gradients[replica] = BatchGradients();
    return;
  }
  r.stage = Stage::kReady;
  ++step->num_finished;
  ++num_updates_;
  if (config_.is_pipelined) held_ = step;
  DropFinishedSteps();
}

Status HostEngine::BeginLanding(int32_t replica, bool always,
                                std::shared_ptr<Step>* update) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (replica < 0 || replica >= config_.num_replicas) return CheckCall(replica);
  if (held_ == nullptr) return Status();
  if (!always) {
    // If the next step has an error, `dequeue` reports it.
    const Replica& r = replicas_[replica];
    std::shared_ptr<Step> next = StepAt(r.dequeued);
    if (r.stage != Stage::kReady || next == nullptr || next->training) {
      return Status();
    }
  }
  if (IsUpdating()) {
    return NotYet(
        "The deferred update must not be applied while another update runs");
  }
  is_landing_ = true;
  *update = held_;
  HandOut(*update);
  return Status();
}

void HostEngine::FinishLanding(bool updated) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!is_landing_) return;  // The engine was reset.
  is_landing_ = false;
  if (!updated) return;
  held_ = nullptr;
  ++num_updates_;
}

}  // namespace layoutmap
