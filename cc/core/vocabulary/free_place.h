// Selects the row for a new key.

#ifndef TF_LAYOUTMAP_CORE_VOCABULARY_FREE_PLACE_H_
#define TF_LAYOUTMAP_CORE_VOCABULARY_FREE_PLACE_H_

#include <algorithm>
#include <cstdint>

#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/policy.h"
#include "cc/core/vocabulary/admit_keys.h"
#include "cc/core/vocabulary/segment_buckets.h"

namespace layoutmap {

// Selects rows in one segment. `Segment` is one of the classes in
// cc/core/vocabulary/segment_buckets.h.
template <typename Segment>
class FreePlace {
 public:
  FreePlace(const BucketLayout& layout, const VocabularyPolicy& policy,
            const VocabularyStep& step, const Segment& segment)
      : layout_(layout), policy_(policy), step_(step), segment_(segment) {}

  // Returns the row of an empty lane. If no lane is empty, returns a row whose
  // key can be evicted, or kNoRow. The search starts in `bucket`. If
  // `may_have_space` is false, no lane is empty.
  int64_t Find(int64_t bucket, bool may_have_space) const {
    const int64_t free = may_have_space ? segment_.FindFree(bucket) : kNoRow;
    if (free != kNoRow) return free;
    // In this case, every key that no step in flight uses can be evicted.
    // Expired keys need no special case, because they are the least recently
    // used keys.
    if (policy_.eviction == Eviction::kLru && step_.pinned_rows.empty()) {
      return segment_.FindLeastRecent(bucket, step_.oldest_in_flight);
    }
    return FindLowestScore(bucket);
  }

 private:
  int64_t FindLowestScore(int64_t bucket) const {
    int64_t found = kNoRow;
    bool found_is_expired = false;
    int32_t found_score = 0;
    for (int64_t p = 0; p < layout_.num_probes(); ++p) {
      const int64_t first_row = bucket * kKeysPerBucket;
      const Lane first = segment_.At(first_row);
      for (int lane = 0; lane < kKeysPerBucket; ++lane) {
        const int64_t row = first_row + lane;
        const int32_t last_step = first.last_step[lane];
        const bool is_expired = IsExpired(policy_, last_step, step_.number);
        if (!is_expired && policy_.eviction == Eviction::kNone) continue;
        if (IsInUse(row, last_step)) continue;
        // If several keys have expired, the key that expired first is selected.
        const int32_t score =
            is_expired
                ? last_step
                : ScoreOf(policy_, last_step, first.count[lane], step_.number);
        const bool is_better =
            found == kNoRow || is_expired > found_is_expired ||
            (is_expired == found_is_expired &&
             (score < found_score || (score == found_score && row < found)));
        if (!is_better) continue;
        found = row;
        found_is_expired = is_expired;
        found_score = score;
      }
      bucket = layout_.Next(bucket);
    }
    return found;
  }

  bool IsInUse(int64_t row, int32_t last_step) const {
    return last_step >= step_.oldest_in_flight ||
           std::binary_search(step_.pinned_rows.begin(),
                              step_.pinned_rows.end(), row);
  }

  const BucketLayout& layout_;
  const VocabularyPolicy& policy_;
  const VocabularyStep& step_;
  const Segment& segment_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_VOCABULARY_FREE_PLACE_H_
