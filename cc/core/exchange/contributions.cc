#include "cc/core/exchange/contributions.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/servers/worker_step.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"

namespace layoutmap {

using std::to_string;

namespace {

constexpr size_t kWordsOfFeature = 3;

constexpr uint32_t kHasCounts = 1;
constexpr uint32_t kHasGains = 2;

// Returns a pointer to the owner of the first shard of a table. The owners of
// the other shards follow.
const int32_t* OwnersOf(const ServersConfig& config, int32_t table) {
  const int32_t* owners = config.server_of_shard.data();
  for (int32_t t = 0; t < table; ++t) {
    owners += config.engine.tables[t].partition.num_shards();
  }
  return owners;
}

void SplitFeature(const ServersConfig& config, int32_t table,
                  const RaggedIds& ids, size_t feature, OwnedParts* parts) {
  const std::vector<int64_t>& offsets =
      config.engine.tables[table].partition.offsets();
  const int32_t* owners = OwnersOf(config, table);
  const Span<const int64_t> splits = ids.splits();
  for (int64_t o = 0; o < ids.num_outputs(); ++o) {
    for (int64_t i = splits[o]; i < splits[o + 1]; ++i) {
      const int64_t row = ids.rows()[i];
      // Finds the last shard that starts at or before the row. That shard
      // contains the row and is therefore not empty.
      const auto end =
          std::upper_bound(offsets.begin(), offsets.end() - 1, row);
      const size_t shard = end - offsets.begin() - 1;
      OwnedPart& part = (*parts)[owners[shard]][feature];
      if (part.outputs.empty() || part.outputs.back() != o) {
        part.outputs.push_back(static_cast<uint32_t>(o));
        part.counts.push_back(0);
      }
      ++part.counts.back();
      part.rows.push_back(static_cast<uint32_t>(row - offsets[shard]));
      if (!ids.gains().empty()) part.gains.push_back(ids.gains()[i]);
    }
  }
}

bool IsOneEach(const std::vector<uint32_t>& counts) {
  return std::all_of(counts.begin(), counts.end(),
                     [](uint32_t count) { return count == 1; });
}

}  // namespace

OwnedParts SplitBatch(const WorkerStep& step, const ParallelFor& parallel_for) {
  const ServersConfig& config = step.config();
  const Batch& batch = step.batch();
  OwnedParts parts(config.num_servers, std::vector<OwnedPart>(batch.size()));
  parallel_for(static_cast<int64_t>(batch.size()), 100000,
               [&](int64_t begin, int64_t end) {
                 for (int64_t f = begin; f < end; ++f) {
                   SplitFeature(config, config.engine.table_of_feature[f],
                                batch[f], f, &parts);
                 }
               });
  return parts;
}

std::vector<uint32_t> WriteParts(const std::vector<OwnedPart>& parts) {
  std::vector<uint32_t> words;
  for (const OwnedPart& part : parts) {
    words.push_back(static_cast<uint32_t>(part.outputs.size()));
    words.push_back(static_cast<uint32_t>(part.rows.size()));
    words.push_back((IsOneEach(part.counts) ? 0u : kHasCounts) |
                    (part.gains.empty() ? 0u : kHasGains));
  }
  for (const OwnedPart& part : parts) {
    if (!IsOneEach(part.counts)) {
      words.insert(words.end(), part.counts.begin(), part.counts.end());
    }
    words.insert(words.end(), part.rows.begin(), part.rows.end());
    const size_t begin = words.size();
    words.resize(begin + part.gains.size());
    if (part.gains.empty()) continue;
    std::memcpy(words.data() + begin, part.gains.data(),
                part.gains.size() * sizeof(float));
  }
  return words;
}

Status ReadParts(Span<const uint32_t> words, int64_t num_features,
                 std::vector<OwnedPart>* parts) {
  const auto bad = [&](const std::string& received) {
    return InvalidArgument(
        "`words` must be the contributions of " + to_string(num_features) +
        " features as split by the sender. Received: " + received);
  };
  const int64_t num_heads =
      num_features * static_cast<int64_t>(kWordsOfFeature);
  if (words.size() < num_heads) {
    return bad(to_string(words.size()) + " words");
  }
  int64_t next = num_heads;
  std::vector<OwnedPart> found(num_features);
  for (int64_t f = 0; f < num_features; ++f) {
    const uint32_t* head = words.data() + f * kWordsOfFeature;
    const int64_t num_outputs = head[0], num_ids = head[1];
    const int64_t num_counts = head[2] & kHasCounts ? num_outputs : 0;
    const int64_t num_gains = head[2] & kHasGains ? num_ids : 0;
    if (words.size() - next < num_counts + num_ids + num_gains) {
      return bad(to_string(words.size()) + " words");
    }
    OwnedPart& part = found[f];
    const uint32_t* data = words.data() + next;
    part.counts.assign(num_outputs, 1);
    if (num_counts > 0) part.counts.assign(data, data + num_counts);
    int64_t sum = 0;
    for (const uint32_t count : part.counts) sum += count;
    if (sum != num_ids) {
      return bad(to_string(num_ids) + " ids, but outputs with a total of " +
                 to_string(sum));
    }
    data += num_counts;
    part.rows.assign(data, data + num_ids);
    data += num_ids;
    part.gains.resize(num_gains);
    if (num_gains > 0) {
      std::memcpy(part.gains.data(), data, num_gains * sizeof(float));
    }
    next += num_counts + num_ids + num_gains;
  }
  if (next != words.size()) return bad(to_string(words.size()) + " words");
  *parts = std::move(found);
  return Status();
}

Status SplitGradients(const WorkerStep& step, const BatchGradients& gradients,
                      const ParallelFor& parallel_for,
                      std::vector<std::vector<float>>* values) {
  const ServersConfig& config = step.config();
  LM_RETURN_IF_ERROR(CheckGradients(config.engine, step.batch(), gradients));
  // Splits the batch a second time. Storing the first result would require
  // memory between the two calls, and the split takes much less time than the
  // network transfer.
  const OwnedParts parts = SplitBatch(step, parallel_for);
  values->assign(parts.size(), {});
  for (size_t s = 0; s < parts.size(); ++s) {
    std::vector<float>& out = (*values)[s];
    size_t size = 0;
    for (size_t f = 0; f < parts[s].size(); ++f) {
      size += parts[s][f].outputs.size() * config.engine.dim_of_feature(f);
    }
    out.reserve(size);
    for (size_t f = 0; f < parts[s].size(); ++f) {
      const int64_t dim = config.engine.dim_of_feature(f);
      for (const uint32_t output : parts[s][f].outputs) {
        const float* row = gradients.features[f].data() + output * dim;
        out.insert(out.end(), row, row + dim);
      }
    }
  }
  return Status();
}

}  // namespace layoutmap
