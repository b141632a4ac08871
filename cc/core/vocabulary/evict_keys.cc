#include "cc/core/vocabulary/evict_keys.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/policy.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/core/vocabulary/admit_keys.h"

namespace layoutmap {
namespace {

bool IsInUse(const VocabularyStep& step, int64_t row, int32_t last_step) {
  return last_step >= step.oldest_in_flight ||
         std::binary_search(step.pinned_rows.begin(), step.pinned_rows.end(),
                            row);
}

template <typename Bucket>
void Free(const Bucket& bucket, int64_t lane) {
  bucket.keys[lane] = kEmptyKey;
  bucket.last_step[lane] = 0;
  bucket.count[lane] = 0;
}

}  // namespace

Status EvictKeys(const BucketLayout& layout, const VocabularyStep& step,
                 Span<const int64_t> keys, const VocabularyState& state,
                 std::vector<KeyOfRow>* evicted) {
  evicted->clear();
  int64_t used = kEmptyKey;
  WithBuckets(state, [&](const auto& buckets) {
    const auto keys_of = [&](int64_t b) { return buckets.keys(b); };
    int64_t num_probes = 0;
    for (int64_t key : keys) {
      if (key == kEmptyKey) continue;
      const int64_t row =
          FindRow(layout, keys_of, layout.BucketOf(key), key, &num_probes);
      if (row == kNoRow) continue;
      const auto bucket = buckets.at(row / kKeysPerBucket);
      const int64_t lane = row % kKeysPerBucket;
      if (IsInUse(step, row, bucket.last_step[lane]) && used == kEmptyKey) {
        used = key;
      }
      evicted->push_back(
          {row, key, bucket.last_step[lane], bucket.count[lane]});
    }
    if (used != kEmptyKey) return;
    // If `keys` contains a key twice, the key is evicted and reported once.
    const auto is_gone = [&](const KeyOfRow& one) {
      const auto bucket = buckets.at(one.row / kKeysPerBucket);
      const int64_t lane = one.row % kKeysPerBucket;
      if (bucket.keys[lane] == kEmptyKey) return true;
      Free(bucket, lane);
      return false;
    };
    evicted->erase(std::remove_if(evicted->begin(), evicted->end(), is_gone),
                   evicted->end());
  });
  if (used == kEmptyKey) return Status();
  evicted->clear();
  return FailedPrecondition("Key " + std::to_string(used) +
                            " cannot be evicted while a step in flight uses "
                            "its row; finish the step first, and call `flush` "
                            "if updates are pipelined");
}

void EvictExpired(const BucketLayout& layout, const VocabularyPolicy& policy,
                  const VocabularyStep& step, const VocabularyState& state,
                  std::vector<KeyOfRow>* evicted) {
  evicted->clear();
  WithBuckets(state, [&](const auto& buckets) {
    const int64_t size = layout.buckets_per_segment();
    const int64_t first = state.first_segment * size;
    const int64_t end = first + state.NumSegments(layout) * size;
    for (int64_t b = first; b < end; ++b) {
      const auto bucket = buckets.at(b);
      for (int64_t lane = 0; lane < kKeysPerBucket; ++lane) {
        const int64_t row = b * kKeysPerBucket + lane;
        const int32_t last_step = bucket.last_step[lane];
        if (bucket.keys[lane] == kEmptyKey ||
            !IsExpired(policy, last_step, step.number) ||
            IsInUse(step, row, last_step)) {
          continue;
        }
        evicted->push_back(
            {row, bucket.keys[lane], last_step, bucket.count[lane]});
        Free(bucket, lane);
      }
    }
  });
}

void TakeBackEvicted(const std::vector<KeyOfRow>& evicted,
                     const VocabularyState& state) {
  WithBuckets(state, [&](const auto& buckets) {
    for (const KeyOfRow& one : evicted) {
      const auto bucket = buckets.at(one.row / kKeysPerBucket);
      const int64_t lane = one.row % kKeysPerBucket;
      bucket.keys[lane] = one.key;
      bucket.last_step[lane] = one.last_step;
      bucket.count[lane] = one.count;
    }
  });
}

std::vector<KeyOfRow> ListKeys(const BucketLayout& layout,
                               const ShardedView<const int64_t>& stored) {
  std::vector<KeyOfRow> found;
  stored.WithRow([&](auto keys_of) {
    for (int64_t b = 0; b < layout.num_buckets(); ++b) {
      const int64_t* keys = keys_of(b);
      for (int64_t lane = 0; lane < kKeysPerBucket; ++lane) {
        if (keys[lane] == kEmptyKey) continue;
        found.push_back({b * kKeysPerBucket + lane, keys[lane]});
      }
    }
  });
  return found;
}

}  // namespace layoutmap
