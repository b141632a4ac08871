#include "cc/core/servers/worker_step.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/servers/messages.h"
#include "cc/core/servers/wire.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"
#include "cc/core/tables/lookup.h"
#include "cc/core/tables/sharded_view.h"

namespace layoutmap {

using std::to_string;

namespace {

// Several memory blocks of rows. The rows are viewed as one table.
template <typename T>
struct Blocks {
  RowPartition partition;
  ShardedView<const T> view;

  Status Make(const std::vector<int64_t>& offsets, std::vector<const T*> data,
              int64_t dim) {
    LM_RETURN_IF_ERROR(RowPartition::Make(
        Placement::kOffsets, Span<const int64_t>(offsets), &partition));
    view.partition = &partition;
    view.shards = std::move(data);
    view.dim = dim;
    return Status();
  }
};

void SetTable(const ShardedView<const float>& view, LookupTask* task) {
  task->table = &view;
}

void SetTable(const ShardedView<const uint16_t>& view, LookupTask* task) {
  task->half_table = &view;
  task->row_type = RowType::kBfloat16;
}

bool Accumulates(Optimizer optimizer, Span<const float> hyperparameters) {
  return !HasModifiers(optimizer, hyperparameters) ||
         ReadModifiers(optimizer, hyperparameters).accumulate;
}

}  // namespace

Status CheckServersConfig(const ServersConfig& config) {
  LM_RETURN_IF_ERROR(CheckConfig(config.engine));
  size_t num_shards = 0;
  for (const TableSpec& table : config.engine.tables) {
    num_shards += table.partition.num_shards();
    if (table.partition.placement() == Placement::kMod) {
      return InvalidArgument("Table '" + table.name +
                             "' on servers must have shards of contiguous "
                             "rows. Received: placement 'mod'");
    }
  }
  if (config.engine.num_replicas != 1) {
    return InvalidArgument(
        "A step of a worker must have one replica. Received: " +
        to_string(config.engine.num_replicas));
  }
  if (config.server_of_shard.size() != num_shards) {
    return InvalidArgument("`shard_servers` must have one value for each of " +
                           to_string(num_shards) + " shards. Received: " +
                           to_string(config.server_of_shard.size()));
  }
  if (config.wire == RowType::kFloat16) {
    return InvalidArgument("`wire_dtype` must be float32 or bfloat16");
  }
  for (const int32_t server : config.server_of_shard) {
    if (server >= 0 && server < config.num_servers) continue;
    return InvalidArgument("`shard_servers` must be in [0, " +
                           to_string(config.num_servers) +
                           "). Received: " + to_string(server));
  }
  return Status();
}

std::shared_ptr<const WorkerStep> WorkerStep::Make(
    std::shared_ptr<const ServersConfig> config,
    std::shared_ptr<const Batch> batch, const ParallelFor& parallel_for,
    FetchedLayout layout) {
  std::shared_ptr<WorkerStep> step(new WorkerStep());
  step->layout_ = std::move(layout);
  step->config_ = std::move(config);
  step->batch_ = std::move(batch);
  const EngineConfig& engine = step->config_->engine;
  step->tables_.resize(engine.tables.size());
  step->ranks_.resize(engine.features.size());
  const std::vector<std::shared_ptr<const Batch>> batches = {step->batch_};
  parallel_for(static_cast<int64_t>(engine.tables.size()), 1000000,
               [&](int64_t begin, int64_t end) {
                 for (int64_t t = begin; t < end; ++t) {
                   std::vector<uint32_t> positions;
                   step->tables_[t] = PrepareTable(
                       engine, static_cast<int32_t>(t), batches, &positions);
                   step->RankRows(t, positions);
                 }
               });
  size_t next = 0;
  for (size_t t = 0; t < engine.tables.size(); ++t) {
    const std::vector<uint32_t>& rows = step->tables_[t].rows;
    const std::vector<int64_t>& offsets = engine.tables[t].partition.offsets();
    int64_t first = 0;
    for (size_t s = 0; s + 1 < offsets.size(); ++s) {
      const int64_t last =
          std::lower_bound(rows.begin() + first, rows.end(), offsets[s + 1],
                           [](uint32_t row, int64_t end) {
                             return static_cast<int64_t>(row) < end;
                           }) -
          rows.begin();
      const std::vector<int64_t>& last_rows = step->layout_.last_rows;
      const int64_t last_row = last_rows.empty() ? -1 : last_rows[next];
      const bool is_unused =
          last_row >= 0 && (first == last || rows[last - 1] != last_row);
      step->parts_.push_back({t, step->config_->server_of_shard[next++],
                              offsets[s], first, last, is_unused});
      first = last;
    }
  }
  return step;
}

void WorkerStep::RankRows(size_t table,
                          const std::vector<uint32_t>& positions) {
  const TableStep& step = tables_[table];
  std::vector<uint32_t> ranks(positions.size());
  for (size_t u = 0; u < step.rows.size(); ++u) {
    for (int64_t k = step.splits[u]; k < step.splits[u + 1]; ++k) {
      ranks[positions[k]] = static_cast<uint32_t>(u);
    }
  }
  // Positions are numbered consecutively over all features of the table.
  auto next = ranks.begin();
  for (size_t f = 0; f < batch_->size(); ++f) {
    if (config_->engine.table_of_feature[f] != static_cast<int32_t>(table)) {
      continue;
    }
    const auto end = next + (*batch_)[f].rows().size();
    ranks_[f].assign(next, end);
    next = end;
  }
}

std::vector<std::vector<uint32_t>> WorkerStep::RowsByServer() const {
  std::vector<std::vector<uint32_t>> words(config_->num_servers);
  for (const Part& part : parts_) {
    words[part.server].push_back(static_cast<uint32_t>(part.last - part.first));
  }
  for (const Part& part : parts_) {
    for (int64_t u = part.first; u < part.last; ++u) {
      words[part.server].push_back(
          static_cast<uint32_t>(tables_[part.table].rows[u] - part.first_row));
    }
  }
  return words;
}

WorkerStep::Sent WorkerStep::RowsToSend(
    const std::vector<bool>& is_single) const {
  Sent sent;
  sent.counts.resize(config_->num_servers);
  sent.rows.resize(config_->num_servers);
  for (const Part& part : parts_) {
    const TableStep& table = tables_[part.table];
    RowWriter writer(&sent.rows[part.server]);
    int64_t count = part.last - part.first;
    if (is_single[part.table]) {
      count = table.splits[part.last] - table.splits[part.first];
    }
    sent.counts[part.server].push_back(static_cast<uint32_t>(count));
    for (int64_t u = part.first; u < part.last; ++u) {
      const int64_t times =
          is_single[part.table] ? table.splits[u + 1] - table.splits[u] : 1;
      for (int64_t k = 0; k < times; ++k) {
        writer.Add(static_cast<uint32_t>(table.rows[u] - part.first_row));
      }
    }
  }
  return sent;
}

Status WorkerStep::Request(const Allocate& allocate) const {
  Sent sent = RowsToSend(std::vector<bool>(tables_.size(), false));
  for (int32_t s = 0; s < config_->num_servers; ++s) {
    const FetchWriter writer = {config_->wire, std::move(sent.counts[s]),
                                std::move(sent.rows[s])};
    uint8_t* bytes;
    LM_RETURN_IF_ERROR(allocate(s, writer.size(), &bytes));
    writer.Write(bytes);
  }
  return Status();
}

Status WorkerStep::CheckFetched(
    const std::vector<Span<const uint8_t>>& fetched) const {
  if (fetched.size() != static_cast<size_t>(config_->num_servers)) {
    return InvalidArgument("`fetched` must have one tensor for each of " +
                           to_string(config_->num_servers) +
                           " servers. Received: " + to_string(fetched.size()));
  }
  std::vector<int64_t> expected;
  for (size_t s = 0; s < fetched.size(); ++s) {
    expected.push_back(HeaderOf(static_cast<int32_t>(s)));
  }
  for (const Part& part : parts_) {
    expected[part.server] += (part.last - part.first + part.num_unused) *
                             config_->engine.tables[part.table].dim *
                             WireBytes(config_->wire);
  }
  for (size_t s = 0; s < fetched.size(); ++s) {
    if (fetched[s].size() == expected[s]) continue;
    return InvalidArgument("`fetched` of server " + to_string(s) +
                           " must have " + to_string(expected[s]) +
                           " bytes, the size of the requested rows. "
                           "Received: " +
                           to_string(fetched[s].size()));
  }
  return Status();
}

Status WorkerStep::LookUp(const std::vector<Span<const uint8_t>>& fetched,
                          const RowKernels& kernels,
                          const ParallelFor& parallel_for,
                          const std::vector<float*>& activations) const {
  LM_RETURN_IF_ERROR(CheckFetched(fetched));
  return config_->wire == RowType::kFloat32
             ? LookUpAs<float>(fetched, kernels, parallel_for, activations)
             : LookUpAs<uint16_t>(fetched, kernels, parallel_for, activations);
}

template <typename T>
Status WorkerStep::LookUpAs(const std::vector<Span<const uint8_t>>& fetched,
                            const RowKernels& kernels,
                            const ParallelFor& parallel_for,
                            const std::vector<float*>& activations) const {
  const EngineConfig& engine = config_->engine;
  std::vector<std::vector<int64_t>> offsets(tables_.size(), {0});
  std::vector<std::vector<const T*>> data(tables_.size());
  std::vector<const T*> next;
  for (size_t s = 0; s < fetched.size(); ++s) {
    next.push_back(reinterpret_cast<const T*>(
        fetched[s].data() + HeaderOf(static_cast<int32_t>(s))));
  }
  for (const Part& part : parts_) {
    offsets[part.table].push_back(part.last);
    data[part.table].push_back(next[part.server]);
    next[part.server] += (part.last - part.first + part.num_unused) *
                         engine.tables[part.table].dim;
  }
  std::vector<Blocks<T>> blocks(tables_.size());
  for (size_t t = 0; t < tables_.size(); ++t) {
    LM_RETURN_IF_ERROR(
        blocks[t].Make(offsets[t], std::move(data[t]), engine.tables[t].dim));
  }
  std::vector<LookupTask> tasks(batch_->size());
  for (size_t f = 0; f < tasks.size(); ++f) {
    const RaggedIds& ids = (*batch_)[f];
    const int32_t t = engine.table_of_feature[f];
    SetTable(blocks[t].view, &tasks[f]);
    tasks[f].rows = ranks_[f];
    tasks[f].splits = ids.splits();
    tasks[f].gains = ids.gains();
    tasks[f].out = {activations[f], ids.num_outputs(), engine.tables[t].dim};
    tasks[f].quantization = engine.tables[t].Quantized();
  }
  LookupAll(tasks, kernels, parallel_for);
  return Status();
}

Status WorkerStep::Fold(const BatchGradients& gradients,
                        const std::vector<Span<const uint8_t>>& fetched,
                        const ClosureToken& token, const RowKernels& kernels,
                        const ParallelFor& parallel_for,
                        const Allocate& allocate) const {
  const bool has_only_headers =
      fetched.size() == static_cast<size_t>(config_->num_servers) &&
      std::all_of(fetched.begin(), fetched.end(), [](Span<const uint8_t> one) {
        return one.size() == kFetchedHeader;
      });
  if (!fetched.empty() && !has_only_headers) {
    LM_RETURN_IF_ERROR(CheckFetched(fetched));
  }
  const EngineConfig& engine = config_->engine;
  LM_RETURN_IF_ERROR(CheckGradients(engine, *batch_, gradients));
  std::vector<bool> is_single(tables_.size());
  std::vector<Blocks<float>> blocks(tables_.size());
  // If an update rule applies one step per contribution, each contribution is a
  // separate sum.
  std::vector<std::vector<int64_t>> single_splits(tables_.size());
  for (size_t t = 0; t < tables_.size(); ++t) {
    const TableSpec& table = engine.tables[t];
    const Span<const float> values = gradients.hyperparameters[t];
    LM_RETURN_IF_ERROR(
        CheckHyperparameters(table.optimizer, table.name, values));
    if (table.optimizer == Optimizer::kNone) {
      return FailedPrecondition("Table '" + table.name +
                                "' has no optimizer: it cannot be trained");
    }
    is_single[t] = !Accumulates(table.optimizer, values);
    if (is_single[t]) {
      single_splits[t].resize(tables_[t].gradient_of.size() + 1);
      std::iota(single_splits[t].begin(), single_splits[t].end(), 0);
    }
    std::vector<int64_t> offsets = {0};
    std::vector<const float*> data;
    for (size_t f = 0; f < batch_->size(); ++f) {
      if (engine.table_of_feature[f] != static_cast<int32_t>(t)) continue;
      offsets.push_back(offsets.back() + (*batch_)[f].num_outputs());
      data.push_back(gradients.features[f].data());
    }
    LM_RETURN_IF_ERROR(blocks[t].Make(offsets, std::move(data), table.dim));
  }

  Sent sent = RowsToSend(is_single);
  std::vector<ApplyWriter> writers(config_->num_servers);
  // For each part, the range of the table's splits that belongs to the part.
  // Each split is one sum of gradients.
  std::vector<Span<const int64_t>> splits;
  for (const Part& part : parts_) {
    const TableStep& table = tables_[part.table];
    int64_t first = part.first, last = part.last;
    const std::vector<int64_t>* all = &table.splits;
    if (is_single[part.table]) {
      first = table.splits[first];
      last = table.splits[last];
      all = &single_splits[part.table];
    }
    splits.emplace_back(all->data() + first, last - first + 1);
    ApplyWriter& writer = writers[part.server];
    const std::vector<float>& values = gradients.hyperparameters[part.table];
    writer.hyperparameters.insert(writer.hyperparameters.end(), values.begin(),
                                  values.end());
    writer.num_values += (last - first) * engine.tables[part.table].dim;
  }
  const bool is_narrow = config_->wire == RowType::kBfloat16;
  std::vector<std::unique_ptr<float[]>> sums(writers.size());
  std::vector<uint8_t*> written;
  std::vector<float*> next;
  for (size_t s = 0; s < writers.size(); ++s) {
    writers[s].header = {token, fetched.empty()
                                    ? kUnknownNumUpdates
                                    : ReadNumUpdates(fetched[s].data())};
    writers[s].wire = config_->wire;
    writers[s].counts = std::move(sent.counts[s]);
    writers[s].rows = std::move(sent.rows[s]);
    uint8_t* bytes;
    LM_RETURN_IF_ERROR(
        allocate(static_cast<int32_t>(s), writers[s].size(), &bytes));
    written.push_back(writers[s].Write(bytes));
    if (is_narrow) sums[s].reset(new float[writers[s].num_values]);
    next.push_back(is_narrow ? sums[s].get()
                             : reinterpret_cast<float*>(written[s]));
  }
  std::vector<LookupTask> tasks(parts_.size());
  for (size_t p = 0; p < parts_.size(); ++p) {
    const Part& part = parts_[p];
    const TableStep& table = tables_[part.table];
    const int64_t dim = engine.tables[part.table].dim;
    const int64_t count = splits[p].size() - 1;
    tasks[p].table = &blocks[part.table].view;
    tasks[p].rows = table.gradient_of;
    tasks[p].splits = splits[p];
    tasks[p].gains = table.gains;
    tasks[p].out = {next[part.server], count, dim};
    next[part.server] += count * dim;
  }
  // The gradients are summed with `LookupAll`, which sums rows of gradients in
  // the same way and in the same order as rows of a table.
  LookupAll(tasks, kernels, parallel_for);
  for (size_t s = 0; is_narrow && s < writers.size(); ++s) {
    ToBfloat16({sums[s].get(), writers[s].num_values}, parallel_for,
               reinterpret_cast<uint16_t*>(written[s]));
  }
  return Status();
}

}  // namespace layoutmap
