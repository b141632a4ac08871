#include "cc/core/vocabulary/move_keys.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/policy.h"
#include "cc/core/keys/vocabulary_state.h"

namespace layoutmap {
namespace {

Status CheckKeys(const std::vector<KeptKey>& keys) {
  std::vector<int64_t> sorted;
  sorted.reserve(keys.size());
  for (const KeptKey& one : keys) sorted.push_back(one.key);
  std::sort(sorted.begin(), sorted.end());
  if (!sorted.empty() && sorted.front() == kEmptyKey) {
    return InvalidArgument("A key must not be " + std::to_string(kEmptyKey) +
                           ", which marks rows without a key");
  }
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice == sorted.end()) return Status();
  return InvalidArgument("Keys must be unique. Received twice: " +
                         std::to_string(*twice));
}

}  // namespace

std::vector<KeptKey> KeysOfState(const BucketLayout& layout,
                                 const VocabularyState& state) {
  std::vector<KeptKey> found;
  WithBuckets(state, [&](const auto& buckets) {
    for (int64_t b = 0; b < layout.num_buckets(); ++b) {
      const auto bucket = buckets.at(b);
      for (int64_t lane = 0; lane < kKeysPerBucket; ++lane) {
        if (bucket.keys[lane] == kEmptyKey) continue;
        found.push_back({b * kKeysPerBucket + lane, bucket.keys[lane],
                         bucket.last_step[lane], bucket.count[lane]});
      }
    }
  });
  return found;
}

Status PutKeys(const BucketLayout& layout, const VocabularyPolicy& policy,
               int32_t step, std::vector<KeptKey> keys,
               const VocabularyState& state, std::vector<RowMove>* moves) {
  LM_RETURN_IF_ERROR(CheckKeys(keys));
  std::sort(keys.begin(), keys.end(), [&](const KeptKey& a, const KeptKey& b) {
    const int32_t score_a = ScoreOf(policy, a.last_step, a.count, step);
    const int32_t score_b = ScoreOf(policy, b.last_step, b.count, step);
    return score_a != score_b ? score_a > score_b : a.key < b.key;
  });
  moves->clear();
  moves->reserve(keys.size());
  WithBuckets(state, [&](const auto& buckets) {
    for (const KeptKey& one : keys) {
      int64_t b = layout.BucketOf(one.key);
      for (int64_t p = 0; p < layout.num_probes(); ++p, b = layout.Next(b)) {
        const auto bucket = buckets.at(b);
        const int lane = FindLane(bucket.keys, kEmptyKey);
        if (lane < 0) continue;
        bucket.keys[lane] = one.key;
        bucket.last_step[lane] = one.last_step;
        bucket.count[lane] = one.count;
        moves->push_back({one.from, b * kKeysPerBucket + lane});
        break;
      }
    }
  });
  return Status();
}

}  // namespace layoutmap
