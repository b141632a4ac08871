#include "cc/core/exchange/key_requests.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
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
#include "cc/core/served_keys/key_step.h"
#include "cc/core/servers/worker_step.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"

namespace layoutmap {

using std::to_string;

namespace {

constexpr int64_t kWordsOfFeature = 2;
constexpr int64_t kWordsOfKey = 2;
constexpr uint32_t kHasTimes = 1;

}  // namespace

const int32_t* KeyRequests::OwnersOf(const Keys& keys) const {
  const ServersConfig& servers = *config_->servers;
  const int32_t table = servers.engine.table_of_feature[keys.feature];
  const int32_t* owners = servers.server_of_shard.data();
  for (int32_t t = 0; t < table; ++t) {
    owners += servers.engine.tables[t].partition.num_shards();
  }
  return owners;
}

void KeyRequests::Find(Span<const int64_t> keys, Keys* found) const {
  const int32_t table =
      config_->servers->engine.table_of_feature[found->feature];
  std::vector<uint32_t> slots(FirstOccurrences::NumSlots(keys.size()));
  FirstOccurrences first_occurrences(slots);
  const auto key_of = [&](uint32_t i) { return found->unique[i]; };
  found->used.reserve(keys.size());
  for (const int64_t key : keys) {
    const auto number = static_cast<uint32_t>(found->unique.size());
    found->unique.push_back(key);
    const uint32_t first = first_occurrences.Add(key, number, key_of);
    found->used.push_back(first);
    if (first == number) {
      found->times.push_back(1);
    } else {
      found->unique.pop_back();
      ++found->times[first];
    }
  }
  const BucketLayout& layout = config_->tables[table].layout;
  config_->servers->engine.tables[table].partition.WithLocate([&](auto locate) {
    found->shards.reserve(found->unique.size());
    for (const int64_t key : found->unique) {
      found->shards.push_back(
          locate(layout.BucketOf(key) * kKeysPerBucket).shard);
    }
  });
}

Status KeyRequests::Make(std::shared_ptr<const KeysConfig> config,
                         const std::vector<FeatureInput<int64_t>>& inputs,
                         const ParallelFor& parallel_for, KeyRequests* made) {
  KeyRequests requests;
  requests.config_ = std::move(config);
  const EngineConfig& engine = requests.config_->servers->engine;
  std::vector<bool> is_open;
  for (const OpenTable& table : requests.config_->tables) {
    is_open.push_back(table.is_open);
  }
  KeyBatches batches;
  LM_RETURN_IF_ERROR(KeyBatches::Make(engine, is_open, {inputs}, &batches));
  std::vector<TableKeys> keys_of_table;
  for (size_t t = 0; t < engine.tables.size(); ++t) {
    keys_of_table.push_back(is_open[t] ? batches.KeysOf(static_cast<int32_t>(t))
                                       : TableKeys());
  }
  requests.batch_ = batches.Finish()[0];
  // The keys of a table are ordered by feature.
  std::vector<int64_t> first(engine.tables.size());
  std::vector<Span<const int64_t>> keys;
  for (size_t f = 0; f < engine.features.size(); ++f) {
    const int32_t t = engine.table_of_feature[f];
    if (!is_open[t]) continue;
    const int64_t size = (*requests.batch_)[f].rows().size();
    keys.push_back({keys_of_table[t].keys.data() + first[t], size});
    first[t] += size;
    requests.keys_.emplace_back();
    requests.keys_.back().feature = static_cast<int32_t>(f);
  }
  parallel_for(static_cast<int64_t>(keys.size()), 1000000,
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   requests.Find(keys[i], &requests.keys_[i]);
                 }
               });
  *made = std::move(requests);
  return Status();
}

std::vector<int64_t> KeyRequests::NumKeys() const {
  std::vector<int64_t> num_keys(config_->servers->num_servers);
  for (const Keys& keys : keys_) {
    const int32_t* owners = OwnersOf(keys);
    for (const int32_t shard : keys.shards) ++num_keys[owners[shard]];
  }
  return num_keys;
}

std::vector<std::vector<uint32_t>> KeyRequests::Write() const {
  const auto num_owners = static_cast<size_t>(config_->servers->num_servers);
  std::vector<std::vector<uint32_t>> words(num_owners);
  for (const Keys& keys : keys_) {
    const int32_t* owners = OwnersOf(keys);
    std::vector<PieceKeys> of_owner(num_owners);
    for (size_t i = 0; i < keys.unique.size(); ++i) {
      PieceKeys& piece = of_owner[owners[keys.shards[i]]];
      piece.keys.push_back(keys.unique[i]);
      piece.times.push_back(keys.times[i]);
    }
    for (size_t s = 0; s < num_owners; ++s) {
      const PieceKeys& piece = of_owner[s];
      const bool has_times =
          std::any_of(piece.times.begin(), piece.times.end(),
                      [](uint32_t times) { return times != 1; });
      words[s].push_back(static_cast<uint32_t>(piece.keys.size()));
      words[s].push_back(has_times ? kHasTimes : 0);
      for (const int64_t key : piece.keys) {
        const auto bits = static_cast<uint64_t>(key);
        words[s].push_back(static_cast<uint32_t>(bits));
        words[s].push_back(static_cast<uint32_t>(bits >> 32));
      }
      if (has_times) {
        words[s].insert(words[s].end(), piece.times.begin(), piece.times.end());
      }
    }
  }
  return words;
}

Status KeyRequests::Place(const std::vector<Span<const uint32_t>>& rows,
                          std::shared_ptr<const Batch>* placed) const {
  const EngineConfig& engine = config_->servers->engine;
  const std::vector<int64_t> num_keys = NumKeys();
  if (rows.size() != num_keys.size()) {
    return InvalidArgument("`rows` must have one tensor for each of " +
                           to_string(num_keys.size()) +
                           " owners. Received: " + to_string(rows.size()));
  }
  for (size_t s = 0; s < rows.size(); ++s) {
    if (rows[s].size() == num_keys[s]) continue;
    return InvalidArgument("`rows` of owner " + to_string(s) + " must have " +
                           to_string(num_keys[s]) +
                           " rows. Received: " + to_string(rows[s].size()));
  }
  auto batch = std::make_shared<Batch>(*batch_);
  std::vector<int64_t> next(rows.size());
  for (const Keys& keys : keys_) {
    const int32_t t = engine.table_of_feature[keys.feature];
    const RowPartition& partition = engine.tables[t].partition;
    const OpenTable& table = config_->tables[t];
    const int32_t* owners = OwnersOf(keys);
    std::vector<int64_t> of_unique(keys.unique.size());
    for (size_t i = 0; i < keys.unique.size(); ++i) {
      const int32_t shard = keys.shards[i];
      const int32_t owner = owners[shard];
      const uint32_t place = rows[owner][next[owner]++];
      const int64_t row = partition.offsets()[shard] + int64_t{place};
      if (place == kNoPlace) {
        of_unique[i] = kNoRow;
      } else if (place < partition.shard_size(shard) &&
                 row < table.layout.num_rows()) {
        of_unique[i] = row;
      } else {
        return InvalidArgument(
            "`rows` must have rows of the requested shards. Received: row " +
            to_string(place) + " of shard " + to_string(shard) + " (table '" +
            engine.tables[t].name + "')");
      }
    }
    std::vector<int64_t> found;
    found.reserve(keys.used.size());
    for (const uint32_t i : keys.used) found.push_back(of_unique[i]);
    (*batch)[keys.feature].TakeRowsOfKeys(
        found, table.has_unknown_row ? table.layout.num_rows() : kNoRow, 0);
  }
  *placed = std::move(batch);
  return Status();
}

Status ReadKeyRequest(Span<const uint32_t> words, int64_t num_features,
                      std::vector<PieceKeys>* keys) {
  const auto bad = [&](const std::string& received) {
    return InvalidArgument(
        "`requests` must be the keys of " + to_string(num_features) +
        " features as written by the sender. Received: " + received);
  };
  std::vector<PieceKeys> found(num_features);
  int64_t next = 0;
  for (PieceKeys& piece : found) {
    if (words.size() - next < kWordsOfFeature) {
      return bad(to_string(words.size()) + " words");
    }
    const int64_t size = words[next];
    const int64_t num_times = words[next + 1] & kHasTimes ? size : 0;
    next += kWordsOfFeature;
    if (words.size() - next < kWordsOfKey * size + num_times) {
      return bad(to_string(words.size()) + " words");
    }
    piece.keys.reserve(size);
    for (int64_t i = 0; i < size; ++i, next += kWordsOfKey) {
      const uint64_t bits =
          uint64_t{words[next + 1]} << 32 | uint64_t{words[next]};
      piece.keys.push_back(static_cast<int64_t>(bits));
    }
    piece.times.assign(size, 1);
    if (num_times > 0) {
      std::copy_n(words.data() + next, num_times, piece.times.begin());
    }
    next += num_times;
    int64_t num_uses = 0;
    for (const uint32_t times : piece.times) {
      if (times == 0) return bad("a key without uses");
      num_uses += times;
    }
    if (num_uses > kMaxUses) return bad(to_string(num_uses) + " uses of keys");
  }
  if (next != words.size()) return bad(to_string(words.size()) + " words");
  *keys = std::move(found);
  return Status();
}

std::vector<int64_t> ExpandUses(const PieceKeys& keys) {
  int64_t num_uses = 0;
  for (const uint32_t times : keys.times) num_uses += times;
  std::vector<int64_t> uses;
  uses.reserve(num_uses);
  for (size_t i = 0; i < keys.keys.size(); ++i) {
    uses.insert(uses.end(), keys.times[i], keys.keys[i]);
  }
  return uses;
}

}  // namespace layoutmap
