#include "cc/emulation/emulated_engine.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/catch_all.h"
#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"
#include "cc/core/tables/lookup.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/emulation/config/tpu_config.h"

namespace layoutmap {
namespace {

using std::to_string;

const char* OptimizerName(Optimizer optimizer) {
  switch (optimizer) {
    case Optimizer::kSgd:
      return "SGD";
    case Optimizer::kAdagrad:
      return "Adagrad";
    case Optimizer::kAdagradMomentum:
      return "AdagradMomentum";
    case Optimizer::kAdam:
      return "Adam";
    case Optimizer::kFtrl:
      return "FTRL";
    default:
      return "another optimizer";
  }
}

template <typename T, typename Vector>
ShardedView<T> MakeView(const TableSpec& spec, Vector& shards) {
  ShardedView<T> view;
  view.partition = &spec.partition;
  view.dim = spec.dim;
  for (auto& shard : shards) view.shards.push_back(shard.data());
  return view;
}

}  // namespace

Status EmulatedEngine::Make(const std::string& serialized, int32_t num_cores,
                            int32_t num_hosts,
                            std::shared_ptr<EmulatedEngine>* made) {
  std::shared_ptr<EmulatedEngine> engine(new EmulatedEngine);
  engine->serialized_ = serialized;
  TpuConfig& config = engine->config_;
  const auto* bytes = reinterpret_cast<const uint8_t*>(serialized.data());
  LM_RETURN_IF_ERROR(ParseTpuConfig(
      {bytes, static_cast<int64_t>(serialized.size())}, &config));
  if (config.engine.num_replicas != num_cores ||
      config.num_hosts != num_hosts) {
    return InvalidArgument("The emulation has " + to_string(num_cores) +
                           " cores on " + to_string(num_hosts) +
                           " hosts. Received: a configuration for " +
                           to_string(config.engine.num_replicas) + " and " +
                           to_string(config.num_hosts));
  }
  LM_RETURN_IF_ERROR(HostEngine::Make(config.engine, &engine->engine_));
  for (const TableSpec& spec : config.engine.tables) {
    Shards zeros;
    for (int32_t host = 0; host < num_hosts; ++host) {
      zeros.emplace_back(spec.partition.shard_size(host) * spec.dim);
    }
    Table table;
    table.values.assign(1 + NumSlots(spec.optimizer), zeros);
    table.is_loaded.assign(num_hosts, false);
    engine->tables_.push_back(std::move(table));
  }
  engine->tickets_.resize(num_cores);
  *made = std::move(engine);
  return Status();
}

Status EmulatedEngine::CheckConfig(const std::string& serialized) const {
  // Most ops have an empty configuration, because TensorFlow omits it to save
  // space.
  if (serialized.empty() || serialized == serialized_) return Status();
  return FailedPrecondition(
      "The TPU is initialized for another embedding than the embedding of this "
      "op; create and trace both after "
      "`tlm.emulation.initialize_tpu_system()`");
}

Status EmulatedEngine::CheckCore(int32_t core) const {
  if (core >= 0 && core < config_.engine.num_replicas) return Status();
  return InvalidArgument(
      "`core` must be in [0, " + to_string(config_.engine.num_replicas - 1) +
      "], the cores of the emulated TPU. Received: core " + to_string(core) +
      "; call `dequeue` and `apply_gradients` within `strategy.run`");
}

Status EmulatedEngine::CheckLoaded() const {
  for (size_t t = 0; t < tables_.size(); ++t) {
    for (size_t host = 0; host < tables_[t].is_loaded.size(); ++host) {
      if (tables_[t].is_loaded[host]) continue;
      return FailedPrecondition("Table '" + config_.engine.tables[t].name +
                                "' has not been loaded on host " +
                                to_string(host));
    }
  }
  return Status();
}

int64_t EmulatedEngine::TakeEnqueueTicket(int32_t core) {
  std::lock_guard<std::mutex> lock(tickets_mutex_);
  if (!CheckCore(core).ok()) return -1;
  tickets_[core].push_back(num_tickets_);
  return num_tickets_++;
}

void EmulatedEngine::ReturnEnqueueTicket(int32_t core, int64_t ticket) {
  std::lock_guard<std::mutex> lock(tickets_mutex_);
  if (!CheckCore(core).ok()) return;
  std::deque<int64_t>& waiting = tickets_[core];
  waiting.erase(std::remove(waiting.begin(), waiting.end(), ticket),
                waiting.end());
}

Status EmulatedEngine::Enqueue(int32_t core, int64_t ticket, bool training,
                               const Status& made,
                               std::shared_ptr<const Batch> batch,
                               const ParallelFor& parallel_for) {
  LM_RETURN_IF_ERROR(CheckCore(core));
  {
    std::lock_guard<std::mutex> lock(tickets_mutex_);
    if (tickets_[core].front() != ticket) {
      return NotYet("for the batches that were enqueued before it");
    }
  }
  // Only the caller with the first ticket can enqueue, so the queue still has
  // room when `EnqueueBatch` is called.
  if (!engine_->HasRoom(core)) return NotYet("for room in the queue");
  return engine_->EnqueueBatch(core, training, made, std::move(batch),
                               parallel_for);
}

Status EmulatedEngine::Receive(int32_t core, const Allocate& allocate,
                               const ParallelFor& parallel_for) {
  LM_RETURN_IF_ERROR(CheckCore(core));
  LM_RETURN_IF_ERROR(ApplyPendingUpdate(core, false, parallel_for));
  std::shared_ptr<const Batch> batch;
  LM_RETURN_IF_ERROR(engine_->BeginDequeue(core, &batch));
  // If the lookup throws an exception, `CatchAll` converts it to a status, so
  // that `FinishDequeue` is called in any case.
  const Status status =
      CatchAll([&] { return LookUp(*batch, allocate, parallel_for); });
  engine_->FinishDequeue(core, status.ok());
  return status;
}

Status EmulatedEngine::LookUp(const Batch& batch, const Allocate& allocate,
                              const ParallelFor& parallel_for) const {
  std::vector<float*> activations;
  LM_RETURN_IF_ERROR(allocate(&activations));
  std::shared_lock<std::shared_mutex> lock(tables_mutex_);
  LM_RETURN_IF_ERROR(CheckLoaded());
  for (size_t f = 0; f < batch.size(); ++f) {
    const RaggedIds& ids = batch[f];
    const int32_t t = config_.engine.table_of_feature[f];
    const TableSpec& spec = config_.engine.tables[t];
    Lookup(MakeView<const float>(spec, tables_[t].values[0]), ids.rows(),
           ids.splits(), ids.gains(), RowKernelsFor(CurrentCpuLevel()),
           parallel_for, {activations[f], ids.num_outputs(), spec.dim},
           spec.Quantized());
  }
  return Status();
}

std::vector<float> EmulatedEngine::HyperparametersOf(
    size_t table, Span<const float> rates) const {
  const TpuRule& rule = config_.rules[table];
  std::vector<float> values = rule.hyperparameters;
  if (rule.dynamic_rate >= 0) values[0] = rates[rule.dynamic_rate];
  return values;
}

Status EmulatedEngine::RunUpdate(const HostEngine::Step& step,
                                 const ParallelFor& parallel_for) {
  std::unique_lock<std::shared_mutex> lock(tables_mutex_);
  LM_RETURN_IF_ERROR(CheckLoaded());
  std::vector<HostEngine::TableViews> views(tables_.size());
  for (size_t t = 0; t < tables_.size(); ++t) {
    const TableSpec& spec = config_.engine.tables[t];
    std::vector<Shards>& values = tables_[t].values;
    views[t].table = MakeView<float>(spec, values[0]);
    for (size_t slot = 1; slot < values.size(); ++slot) {
      views[t].slots.push_back(MakeView<float>(spec, values[slot]));
    }
    views[t].hyperparameters = step.hyperparameters[t];
  }
  return engine_->Update(step, views, RowKernelsFor(CurrentCpuLevel()),
                         parallel_for);
}

Status EmulatedEngine::ApplyPendingUpdate(int32_t core, bool always,
                                          const ParallelFor& parallel_for) {
  std::shared_ptr<HostEngine::Step> pending;
  LM_RETURN_IF_ERROR(engine_->BeginLanding(core, always, &pending));
  if (pending == nullptr) return Status();
  const Status status =
      CatchAll([&] { return RunUpdate(*pending, parallel_for); });
  engine_->FinishLanding(status.ok());
  return status;
}

Status EmulatedEngine::Send(int32_t core, BatchGradients gradients,
                            Span<const float> rates,
                            const ParallelFor& parallel_for) {
  LM_RETURN_IF_ERROR(CheckCore(core));
  if (gradients.features.size() != config_.engine.features.size() ||
      rates.size() != config_.num_rates) {
    return InvalidArgument(
        "The embedding has " + to_string(config_.engine.features.size()) +
        " features and " + to_string(config_.num_rates) +
        " dynamic learning rates. Received: " +
        to_string(gradients.features.size()) + " gradients and " +
        to_string(rates.size()) + " rates");
  }
  for (size_t t = 0; t < tables_.size(); ++t) {
    const TableSpec& spec = config_.engine.tables[t];
    gradients.hyperparameters.push_back(HyperparametersOf(t, rates));
    LM_RETURN_IF_ERROR(CheckHyperparameters(spec.optimizer, spec.name,
                                            gradients.hyperparameters.back()));
  }
  std::shared_ptr<HostEngine::Step> step;
  LM_RETURN_IF_ERROR(engine_->BeginApply(core, std::move(gradients), &step));
  // No update can run yet.
  if (step == nullptr) return Status();
  const Status status =
      CatchAll([&] { return RunUpdate(*step, parallel_for); });
  engine_->FinishApply(core, status.ok());
  return status;
}

Status EmulatedEngine::FindTable(const std::string& name, int64_t id,
                                 int32_t* table) const {
  const std::vector<TableSpec>& specs = config_.engine.tables;
  for (size_t t = 0; t < specs.size(); ++t) {
    if (name.empty() ? id != static_cast<int64_t>(t) : name != specs[t].name) {
      continue;
    }
    *table = static_cast<int32_t>(t);
    return Status();
  }
  return InvalidArgument("The TPU must have a table '" + name + "' (table_id " +
                         to_string(id) + ")");
}

Status EmulatedEngine::CheckShard(int32_t table, Optimizer optimizer,
                                  int64_t shard, int64_t num_shards) const {
  const TableSpec& spec = config_.engine.tables[table];
  const std::string where = "Table '" + spec.name + "': ";
  if (spec.optimizer != optimizer) {
    return InvalidArgument(
        where + "its optimizer is " + OptimizerName(spec.optimizer) +
        ". Received: parameters of " + OptimizerName(optimizer));
  }
  if (num_shards != config_.num_hosts || shard < 0 || shard >= num_shards) {
    return InvalidArgument(where + "it has " + to_string(config_.num_hosts) +
                           " shards, one per host. Received: shard_id " +
                           to_string(shard) + " of num_shards " +
                           to_string(num_shards));
  }
  return Status();
}

Status EmulatedEngine::Load(int32_t table, int32_t shard,
                            const ShardValues& values,
                            const ParallelFor& parallel_for) {
  const HostEngine::Description d = engine_->Describe();
  for (int32_t core = 0; core < config_.engine.num_replicas; ++core) {
    if (d.pending[core] == 0 && !d.awaiting[core]) continue;
    return FailedPrecondition(
        "Table '" + config_.engine.tables[table].name +
        "' must not be loaded or restored while steps are in flight:\n" +
        Report());
  }
  // The pending update must be applied first. Otherwise, it would change the
  // loaded values later.
  LM_RETURN_IF_ERROR(ApplyPendingUpdate(0, true, parallel_for));
  std::unique_lock<std::shared_mutex> lock(tables_mutex_);
  Table& kept = tables_[table];
  for (size_t v = 0; v < values.size(); ++v) {
    std::vector<float>& rows = kept.values[v][shard];
    if (values[v].size() != static_cast<int64_t>(rows.size())) {
      return InvalidArgument(
          "Table '" + config_.engine.tables[table].name + "', shard " +
          to_string(shard) + ": it must have " + to_string(rows.size()) +
          " values. Received: " + to_string(values[v].size()));
    }
  }
  for (size_t v = 0; v < values.size(); ++v) {
    std::copy(values[v].begin(), values[v].end(),
              kept.values[v][shard].begin());
  }
  kept.is_loaded[shard] = true;
  return Status();
}

Status EmulatedEngine::Retrieve(int32_t table, int32_t shard,
                                const std::vector<Span<float>>& values,
                                const ParallelFor& parallel_for) {
  LM_RETURN_IF_ERROR(ApplyPendingUpdate(0, true, parallel_for));
  std::shared_lock<std::shared_mutex> lock(tables_mutex_);
  LM_RETURN_IF_ERROR(CheckLoaded());
  for (size_t v = 0; v < values.size(); ++v) {
    const std::vector<float>& rows = tables_[table].values[v][shard];
    std::copy(rows.begin(), rows.end(), values[v].begin());
  }
  return Status();
}

void EmulatedEngine::Reset() {
  engine_->Reset();
  pending_calls_.Changed();
}

std::string EmulatedEngine::Report() const {
  const HostEngine::Description d = engine_->Describe();
  std::string report;
  for (int32_t core = 0; core < config_.engine.num_replicas; ++core) {
    report += "  core " + to_string(core) + ": " + to_string(d.pending[core]) +
              " batches wait for `dequeue`" +
              (d.awaiting[core] ? ", one for its gradients" : "") + "\n";
  }
  for (const std::string& name : pending_calls_.Waiting()) {
    report += "  waiting: " + name + "\n";
  }
  if (!d.poisoned.empty()) report += "  stopped: " + d.poisoned + "\n";
  report += "  " + to_string(d.num_updates) + " updates so far";
  return report;
}

}  // namespace layoutmap
