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
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/engine/engine_config.h"
#include "cc/core/engine/step.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/servers/messages.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/tables/lookup.h"
#include "cc/core/tables/sharded_view.h"

namespace layoutmap {

using std::to_string;

namespace {

// Blocks of rows that lie apart in memory, as a table.
struct Blocks {
  RowPartition partition;
  ShardedView<const float> view;

  Status Make(const std::vector<int64_t>& offsets,
              std::vector<const float*> data, int64_t dim) {
    LM_RETURN_IF_ERROR(RowPartition::Make(
        Placement::kOffsets, Span<const int64_t>(offsets), &partition));
    view.partition = &partition;
    view.shards = std::move(data);
    view.dim = dim;
    return Status();
  }
};

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
                             "' on servers must be in shards of contiguous "
                             "rows. Received: placement 'mod'");
    }
  }
  if (config.engine.num_replicas != 1) {
    return InvalidArgument("A step of a worker has one replica. Received: " +
                           to_string(config.engine.num_replicas));
  }
  if (config.server_of_shard.size() != num_shards) {
    return InvalidArgument("`shard_servers` must have one value for each of " +
                           to_string(num_shards) + " shards. Received: " +
                           to_string(config.server_of_shard.size()));
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
    std::shared_ptr<const Batch> batch, const ParallelFor& parallel_for) {
  std::shared_ptr<WorkerStep> step(new WorkerStep());
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
      step->parts_.push_back(
          {t, step->config_->server_of_shard[next++], offsets[s], first, last});
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
  // Positions are numbered through the table's features.
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

std::vector<std::vector<uint32_t>> WorkerStep::FetchWords() const {
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

Status WorkerStep::CheckFetched(
    const std::vector<Span<const float>>& fetched) const {
  if (fetched.size() != static_cast<size_t>(config_->num_servers)) {
    return InvalidArgument("`fetched` must have one tensor for each of " +
                           to_string(config_->num_servers) +
                           " servers. Received: " + to_string(fetched.size()));
  }
  std::vector<int64_t> expected(fetched.size(), kFetchedHeader);
  for (const Part& part : parts_) {
    expected[part.server] +=
        (part.last - part.first) * config_->engine.tables[part.table].dim;
  }
  for (size_t s = 0; s < fetched.size(); ++s) {
    if (fetched[s].size() == expected[s]) continue;
    return InvalidArgument("`fetched` of server " + to_string(s) +
                           " must have " + to_string(expected[s]) +
                           " values, those of the rows that were asked for. "
                           "Received: " +
                           to_string(fetched[s].size()));
  }
  return Status();
}

Status WorkerStep::LookUp(const std::vector<Span<const float>>& fetched,
                          const RowKernels& kernels,
                          const ParallelFor& parallel_for,
                          const std::vector<float*>& activations) const {
  LM_RETURN_IF_ERROR(CheckFetched(fetched));
  const EngineConfig& engine = config_->engine;
  std::vector<std::vector<int64_t>> offsets(tables_.size(), {0});
  std::vector<std::vector<const float*>> data(tables_.size());
  std::vector<const float*> next;
  for (const Span<const float> one : fetched) {
    next.push_back(one.data() + kFetchedHeader);
  }
  for (const Part& part : parts_) {
    offsets[part.table].push_back(part.last);
    data[part.table].push_back(next[part.server]);
    next[part.server] +=
        (part.last - part.first) * engine.tables[part.table].dim;
  }
  std::vector<Blocks> blocks(tables_.size());
  for (size_t t = 0; t < tables_.size(); ++t) {
    LM_RETURN_IF_ERROR(
        blocks[t].Make(offsets[t], std::move(data[t]), engine.tables[t].dim));
  }
  std::vector<LookupTask> tasks(batch_->size());
  for (size_t f = 0; f < tasks.size(); ++f) {
    const RaggedIds& ids = (*batch_)[f];
    const int32_t t = engine.table_of_feature[f];
    tasks[f].table = &blocks[t].view;
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
                        const std::vector<Span<const float>>& fetched,
                        const ClosureToken& token, const RowKernels& kernels,
                        const ParallelFor& parallel_for,
                        std::vector<ServerMessage>* messages) const {
  LM_RETURN_IF_ERROR(CheckFetched(fetched));
  const EngineConfig& engine = config_->engine;
  LM_RETURN_IF_ERROR(CheckGradients(engine, *batch_, gradients));
  std::vector<bool> accumulates(tables_.size());
  std::vector<Blocks> blocks(tables_.size());
  // For rules that take one step per contribution: each is a sum of its own.
  std::vector<std::vector<int64_t>> single_splits(tables_.size());
  for (size_t t = 0; t < tables_.size(); ++t) {
    const TableSpec& table = engine.tables[t];
    const Span<const float> values = gradients.hyperparameters[t];
    LM_RETURN_IF_ERROR(
        CheckHyperparameters(table.optimizer, table.name, values));
    if (table.optimizer == Optimizer::kNone) {
      return FailedPrecondition("Table '" + table.name +
                                "' has no optimizer: it takes no gradients");
    }
    accumulates[t] = Accumulates(table.optimizer, values);
    if (!accumulates[t]) {
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

  messages->assign(config_->num_servers, {});
  for (size_t s = 0; s < messages->size(); ++s) {
    WriteHeader({token, ReadNumUpdates(fetched[s].data())},
                &(*messages)[s].words);
  }
  // The sums of each part: [first, last) of its table's splits.
  std::vector<Span<const int64_t>> splits;
  std::vector<int64_t> sizes(messages->size(), 0);
  for (const Part& part : parts_) {
    const TableStep& table = tables_[part.table];
    int64_t first = part.first, last = part.last;
    const std::vector<int64_t>* all = &table.splits;
    if (!accumulates[part.table]) {
      first = table.splits[first];
      last = table.splits[last];
      all = &single_splits[part.table];
    }
    splits.emplace_back(all->data() + first, last - first + 1);
    ServerMessage& message = (*messages)[part.server];
    message.words.push_back(static_cast<uint32_t>(last - first));
    const std::vector<float>& values = gradients.hyperparameters[part.table];
    message.values.insert(message.values.end(), values.begin(), values.end());
    sizes[part.server] += (last - first) * engine.tables[part.table].dim;
  }
  std::vector<float*> next;
  for (size_t s = 0; s < messages->size(); ++s) {
    std::vector<float>& values = (*messages)[s].values;
    const size_t begin = values.size();
    values.resize(begin + sizes[s]);
    next.push_back(values.data() + begin);
  }
  std::vector<LookupTask> tasks(parts_.size());
  for (size_t p = 0; p < parts_.size(); ++p) {
    const Part& part = parts_[p];
    const TableStep& table = tables_[part.table];
    const int64_t dim = engine.tables[part.table].dim;
    std::vector<uint32_t>& words = (*messages)[part.server].words;
    for (int64_t u = part.first; u < part.last; ++u) {
      const int64_t times =
          accumulates[part.table] ? 1 : table.splits[u + 1] - table.splits[u];
      words.insert(words.end(), times,
                   static_cast<uint32_t>(table.rows[u] - part.first_row));
    }
    const int64_t count = splits[p].size() - 1;
    tasks[p].table = &blocks[part.table].view;
    tasks[p].rows = table.gradient_of;
    tasks[p].splits = splits[p];
    tasks[p].gains = table.gains;
    tasks[p].out = {next[part.server], count, dim};
    next[part.server] += count * dim;
  }
  // A sum of gradients is a lookup in them: the same loop, the same order.
  LookupAll(tasks, kernels, parallel_for);
  return Status();
}

}  // namespace layoutmap
