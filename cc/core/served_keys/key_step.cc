#include "cc/core/served_keys/key_step.h"

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/engine/key_batches.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/keys_by_segment.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/served_keys/key_messages.h"
#include "cc/core/servers/messages.h"
#include "cc/core/servers/wire.h"
#include "cc/core/servers/worker_step.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"

namespace layoutmap {

using std::to_string;

namespace {

// Calls `visit(table, shard, server)` for each shard of each table, in order.
template <typename Visit>
void ForShards(const ServersConfig& servers, const Visit& visit) {
  size_t next = 0;
  for (size_t t = 0; t < servers.engine.tables.size(); ++t) {
    const int32_t num_shards = servers.engine.tables[t].partition.num_shards();
    for (int32_t s = 0; s < num_shards; ++s) {
      visit(t, s, servers.server_of_shard[next++]);
    }
  }
}

}  // namespace

Status MakeKeysConfig(std::shared_ptr<const ServersConfig> servers,
                      std::vector<OpenTable> tables, KeysConfig* config) {
  const std::vector<TableSpec>& specs = servers->engine.tables;
  for (size_t t = 0; t < specs.size(); ++t) {
    if (!tables[t].is_open) continue;
    const std::vector<int64_t>& offsets = specs[t].partition.offsets();
    const int64_t num_rows = offsets.back();
    bool is_aligned = num_rows % kKeysPerBucket == 1;
    for (size_t s = 0; s + 1 < offsets.size(); ++s) {
      is_aligned &= offsets[s] % kKeysPerBucket == 0;
    }
    if (!is_aligned) {
      return InvalidArgument(
          "Table '" + specs[t].name +
          "' with an open vocabulary must be partitioned into complete buckets "
          "of " +
          to_string(kKeysPerBucket) +
          " rows, and one row for unknown keys at the end. Received: " +
          to_string(num_rows) + " rows in " + to_string(offsets.size() - 1) +
          " shards");
    }
    LM_RETURN_IF_ERROR(
        BucketLayout::Make(num_rows / kKeysPerBucket, &tables[t].layout));
  }
  config->servers = std::move(servers);
  config->tables = std::move(tables);
  return Status();
}

KeyStep::Keys KeyStep::Find(const OpenTable& table,
                            const RowPartition& partition,
                            Span<const int64_t> keys) {
  Keys found;
  std::vector<uint32_t> slots(FirstOccurrences::NumSlots(keys.size()));
  FirstOccurrences first_occurrences(slots);
  const auto key_of = [&](uint32_t i) { return found.unique[i]; };
  found.used.reserve(keys.size());
  for (const int64_t key : keys) {
    const auto number = static_cast<uint32_t>(found.unique.size());
    found.unique.push_back(key);
    const uint32_t first = first_occurrences.Add(key, number, key_of);
    found.used.push_back(first);
    if (first == number) {
      found.times.push_back(1);
    } else {
      found.unique.pop_back();
      ++found.times[first];
    }
  }
  partition.WithLocate([&](auto locate) {
    found.shards.reserve(found.unique.size());
    for (const int64_t key : found.unique) {
      found.shards.push_back(
          locate(table.layout.BucketOf(key) * kKeysPerBucket).shard);
    }
  });
  return found;
}

Status KeyStep::Make(std::shared_ptr<const KeysConfig> config,
                     const std::vector<FeatureInput<int64_t>>& inputs,
                     const ParallelFor& parallel_for,
                     std::shared_ptr<const KeyStep>* made) {
  std::shared_ptr<KeyStep> step(new KeyStep());
  step->config_ = std::move(config);
  const EngineConfig& engine = step->config_->servers->engine;
  const auto num_tables = static_cast<int64_t>(engine.tables.size());
  std::vector<bool> is_open;
  for (const OpenTable& table : step->config_->tables) {
    is_open.push_back(table.is_open);
  }
  KeyBatches batches;
  LM_RETURN_IF_ERROR(KeyBatches::Make(engine, is_open, {inputs}, &batches));
  step->keys_.resize(num_tables);
  parallel_for(num_tables, 1000000, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const OpenTable& table = step->config_->tables[t];
      if (!table.is_open) continue;
      const TableKeys keys = batches.KeysOf(static_cast<int32_t>(t));
      step->keys_[t] = Find(table, engine.tables[t].partition, keys.keys);
    }
  });
  step->batch_ = batches.Finish()[0];
  *made = std::move(step);
  return Status();
}

Status KeyStep::Request(const ClosureToken& token, bool training,
                        const std::vector<uint32_t>& kinds,
                        const Allocate& allocate) const {
  assert(kinds.size() == keys_.size());
  const ServersConfig& servers = *config_->servers;
  const EngineConfig& engine = servers.engine;
  std::vector<KeyFetchWriter> writers(servers.num_servers);
  for (KeyFetchWriter& writer : writers) {
    writer.token = token;
    writer.training = training;
    writer.wire = servers.wire;
  }
  size_t table_of_rows = engine.tables.size();
  std::vector<uint32_t> rows;
  size_t next_row = 0;
  std::vector<std::vector<KeyFetchWriter::Asked*>> requests(
      engine.tables.size());
  ForShards(servers, [&](size_t, int32_t, int32_t server) {
    writers[server].pieces.emplace_back();
  });
  std::vector<size_t> next_piece(servers.num_servers);
  ForShards(servers, [&](size_t t, int32_t s, int32_t server) {
    KeyFetchWriter::Asked& piece = writers[server].pieces[next_piece[server]++];
    const OpenTable& table = config_->tables[t];
    if (table.is_open) {
      // Every shard gets the kind of the batch's keys, even if it gets no keys,
      // so that all shards store the same kind.
      piece.kind = keys_[t].unique.empty() ? 0 : kinds[t];
      requests[t].push_back(&piece);
      return;
    }
    if (table_of_rows != t) {
      table_of_rows = t;
      rows = PrepareTable(engine, static_cast<int32_t>(t), {batch_}).rows;
      next_row = 0;
    }
    const std::vector<int64_t>& offsets = engine.tables[t].partition.offsets();
    RowWriter writer(&piece.compact);
    for (; next_row < rows.size() && rows[next_row] < offsets[s + 1];
         ++next_row) {
      writer.Add(rows[next_row] - static_cast<uint32_t>(offsets[s]));
      ++piece.count;
    }
  });
  for (size_t t = 0; t < keys_.size(); ++t) {
    std::vector<RowWriter> uses;
    std::vector<uint32_t> sums(requests[t].size());
    uses.reserve(requests[t].size());
    for (KeyFetchWriter::Asked* piece : requests[t]) {
      uses.emplace_back(&piece->compact);
    }
    for (size_t i = 0; i < keys_[t].unique.size(); ++i) {
      const int32_t s = keys_[t].shards[i];
      requests[t][s]->keys.push_back(keys_[t].unique[i]);
      ++requests[t][s]->count;
      sums[s] += keys_[t].times[i];
      uses[s].Add(sums[s]);
    }
  }
  for (int32_t s = 0; s < servers.num_servers; ++s) {
    uint8_t* bytes;
    LM_RETURN_IF_ERROR(allocate(s, writers[s].size(), &bytes));
    writers[s].Write(bytes);
  }
  return Status();
}

Status KeyStep::ReadPlaces(const std::vector<Span<const uint8_t>>& fetched,
                           std::vector<std::vector<int64_t>>* rows,
                           FetchedLayout* layout) const {
  const ServersConfig& servers = *config_->servers;
  std::vector<std::vector<int64_t>> num_keys(keys_.size());
  std::vector<int64_t> total(servers.num_servers);
  for (size_t t = 0; t < keys_.size(); ++t) {
    num_keys[t].resize(servers.engine.tables[t].partition.num_shards());
    for (const int32_t s : keys_[t].shards) ++num_keys[t][s];
  }
  ForShards(servers, [&](size_t t, int32_t s, int32_t server) {
    total[server] += num_keys[t][s];
  });
  for (int32_t s = 0; s < servers.num_servers; ++s) {
    layout->headers.push_back(FetchedKeysHeader(total[s]));
    if (fetched[s].size() >= layout->headers.back()) continue;
    return InvalidArgument("`fetched` of server " + to_string(s) +
                           " must have the rows of " + to_string(total[s]) +
                           " keys. Received: " + to_string(fetched[s].size()) +
                           " bytes, too few");
  }
  // For each shard, a pointer to the rows of its keys.
  std::vector<std::vector<const uint8_t*>> places(keys_.size());
  std::vector<int64_t> first(servers.num_servers);
  ForShards(servers, [&](size_t t, int32_t s, int32_t server) {
    places[t].push_back(fetched[server].data() + kFetchedHeader +
                        first[server] * sizeof(uint32_t));
    first[server] += num_keys[t][s];
    const OpenTable& table = config_->tables[t];
    const RowPartition& partition = servers.engine.tables[t].partition;
    layout->last_rows.push_back(table.has_unknown_row &&
                                        s + 1 == partition.num_shards()
                                    ? table.layout.num_rows()
                                    : -1);
  });
  rows->resize(keys_.size());
  for (size_t t = 0; t < keys_.size(); ++t) {
    const RowPartition& partition = servers.engine.tables[t].partition;
    for (const int32_t s : keys_[t].shards) {
      uint32_t place;
      std::memcpy(&place, places[t][s], sizeof(place));
      places[t][s] += sizeof(place);
      if (place == kNoPlace) {
        (*rows)[t].push_back(kNoRow);
        continue;
      }
      const int64_t row = partition.offsets()[s] + place;
      if (place >= partition.shard_size(s) ||
          row >= config_->tables[t].layout.num_rows()) {
        return InvalidArgument(
            "`fetched` must have rows of the requested shards. Received: row " +
            to_string(place) + " of shard " + to_string(s) + " (table '" +
            servers.engine.tables[t].name + "')");
      }
      (*rows)[t].push_back(row);
    }
  }
  return Status();
}

void KeyStep::AppendRows(size_t f,
                         const std::vector<std::vector<int64_t>>& rows,
                         std::vector<size_t>* next,
                         std::vector<int64_t>* found) const {
  const int32_t t = config_->servers->engine.table_of_feature[f];
  const std::vector<uint32_t>& used = keys_[t].used;
  const int64_t size = (*batch_)[f].rows().size();
  for (int64_t i = 0; i < size; ++i) {
    found->push_back(rows[t][used[(*next)[t]++]]);
  }
}

Status KeyStep::CheckNumFetched(size_t num_fetched) const {
  if (num_fetched == static_cast<size_t>(config_->servers->num_servers)) {
    return Status();
  }
  return InvalidArgument("`fetched` must have one tensor for each of " +
                         to_string(config_->servers->num_servers) +
                         " servers. Received: " + to_string(num_fetched));
}

Status KeyStep::Place(const std::vector<Span<const uint8_t>>& fetched,
                      const ParallelFor& parallel_for,
                      std::shared_ptr<const WorkerStep>* placed) const {
  const EngineConfig& engine = config_->servers->engine;
  LM_RETURN_IF_ERROR(CheckNumFetched(fetched.size()));
  std::vector<std::vector<int64_t>> rows;
  FetchedLayout layout;
  LM_RETURN_IF_ERROR(ReadPlaces(fetched, &rows, &layout));
  auto batch = std::make_shared<Batch>(*batch_);
  std::vector<size_t> next(keys_.size());
  for (size_t f = 0; f < batch->size(); ++f) {
    const OpenTable& table = config_->tables[engine.table_of_feature[f]];
    if (!table.is_open) continue;
    std::vector<int64_t> found;
    found.reserve((*batch)[f].rows().size());
    AppendRows(f, rows, &next, &found);
    (*batch)[f].TakeRowsOfKeys(
        found, table.has_unknown_row ? table.layout.num_rows() : kNoRow, 0);
  }
  *placed = WorkerStep::Make(config_->servers, std::move(batch), parallel_for,
                             std::move(layout));
  return Status();
}

Status KeyStep::PlaceJoined(const std::vector<Lookup>& lookups,
                            const ParallelFor& parallel_for,
                            std::shared_ptr<const WorkerStep>* placed) const {
  const EngineConfig& engine = config_->servers->engine;
  // The rows of the unique keys of each table, for each lookup.
  std::vector<std::vector<std::vector<int64_t>>> rows(lookups.size());
  std::vector<std::vector<size_t>> next(lookups.size());
  for (size_t c = 0; c < lookups.size(); ++c) {
    const KeyStep& lookup = *lookups[c].step;
    if (lookup.batch_->size() != batch_->size() ||
        lookup.keys_.size() != keys_.size()) {
      return InvalidArgument(
          "All lookups of a step must have the features of the joined batch. "
          "Received: lookup " +
          to_string(c) + " with " + to_string(lookup.batch_->size()) +
          " features");
    }
    FetchedLayout layout;
    LM_RETURN_IF_ERROR(lookup.CheckNumFetched(lookups[c].fetched.size()));
    LM_RETURN_IF_ERROR(
        lookup.ReadPlaces(lookups[c].fetched, &rows[c], &layout));
    next[c].resize(keys_.size());
  }
  auto batch = std::make_shared<Batch>(*batch_);
  for (size_t f = 0; f < batch->size(); ++f) {
    const OpenTable& table = config_->tables[engine.table_of_feature[f]];
    if (!table.is_open) continue;
    std::vector<int64_t> found;
    for (size_t c = 0; c < lookups.size(); ++c) {
      lookups[c].step->AppendRows(f, rows[c], &next[c], &found);
    }
    const int64_t size = (*batch)[f].rows().size();
    if (static_cast<int64_t>(found.size()) != size) {
      return InvalidArgument(
          "A joined batch must have the keys of all lookups of its step. "
          "Received: " +
          to_string(size) + " keys instead of " + to_string(found.size()) +
          " (feature '" + engine.features[f].feature + "')");
    }
    (*batch)[f].TakeRowsOfKeys(
        found, table.has_unknown_row ? table.layout.num_rows() : kNoRow, 0);
  }
  *placed = WorkerStep::Make(config_->servers, std::move(batch), parallel_for);
  return Status();
}

std::vector<int64_t> KeyStep::JoinedSizes(const WorkerStep& step) const {
  const ServersConfig& servers = *config_->servers;
  const std::vector<std::vector<uint32_t>> counts = step.RowsByServer();
  std::vector<int64_t> sizes(servers.num_servers, kFetchedHeader);
  std::vector<size_t> next(servers.num_servers);
  ForShards(servers, [&](size_t t, int32_t, int32_t server) {
    sizes[server] += counts[server][next[server]++] *
                     servers.engine.tables[t].dim * WireBytes(servers.wire);
  });
  return sizes;
}

}  // namespace layoutmap
