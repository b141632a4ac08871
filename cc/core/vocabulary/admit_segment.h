// What a training step does to the keys of one segment.

#ifndef TF_LAYOUTMAP_CORE_VOCABULARY_ADMIT_SEGMENT_H_
#define TF_LAYOUTMAP_CORE_VOCABULARY_ADMIT_SEGMENT_H_

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/keys_by_segment.h"
#include "cc/core/keys/policy.h"
#include "cc/core/keys/sketch.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/core/vocabulary/admit_keys.h"

namespace layoutmap {

// What a lane was, to take a refused step back.
struct OldLane {
  int64_t row;
  int64_t key;
  int32_t last_step;
  int32_t count;
};

// A key without a row, by its place among those of its segment.
struct Missing {
  uint32_t first;  // the place of its first occurrence
  uint32_t times;  // of the first: how often it occurs
};

// The keys of one segment, and what comes of them. All memory is allocated
// before the workers begin: too little of it must be an error of the call.
struct SegmentKeys {
  Span<KeyPlace> places;    // of all keys, then of those without a row
  Span<Missing> missing;    // one for each place without a row
  Span<uint32_t> slots;     // of FirstOccurrences
  Span<NewKey> new_keys;    // as many as there are places without a row
  Span<OldLane> old_lanes;  // empty, or two for each key
  Span<uint8_t> sketch;
  int64_t* seen = nullptr;
  int64_t num_missing = 0;
  int64_t num_new_keys = 0;
  int64_t num_old_lanes = 0;
  int64_t failed_at = std::numeric_limits<int64_t>::max();  // a position
  VocabularyCounts counts;
};

template <typename Locate>
class AdmitSegment {
 public:
  AdmitSegment(const BucketLayout& layout, const VocabularyPolicy& policy,
               const VocabularyStep& step, const Buckets<Locate>& buckets,
               Span<const int64_t> keys, Span<int64_t> rows,
               SegmentKeys* segment)
      : layout_(layout),
        policy_(policy),
        step_(step),
        buckets_(buckets),
        keys_(keys),
        rows_(rows),
        s_(*segment) {}

  // Counts the uses of keys that have a row; keeps the places of the others.
  void CountKnown() {
    // All lines of so many keys are asked for before the first is looked at.
    constexpr int64_t kAhead = 16;
    const auto keys_of = [&](int64_t b) { return buckets_.keys(b); };
    const int64_t num_places = s_.places.size();
    int64_t num_probes = 0, num_missing = 0;
    for (int64_t first = 0; first < num_places; first += kAhead) {
      const int64_t end = std::min(first + kAhead, num_places);
      for (int64_t i = first; i < end; ++i) {
        const auto bucket = buckets_.at(s_.places[i].bucket);
        __builtin_prefetch(bucket.keys);
        __builtin_prefetch(bucket.last_step, /*write=*/1);
        __builtin_prefetch(bucket.count, /*write=*/1);
      }
      for (int64_t i = first; i < end; ++i) {
        const KeyPlace place = s_.places[i];
        const int64_t row = FindRow(layout_, keys_of, place.bucket,
                                    keys_[place.position], &num_probes);
        rows_[place.position] = row;
        if (row == kNoRow) {
          s_.places[num_missing++] = place;
        } else {
          CountUse(row);
        }
      }
    }
    s_.num_missing = num_missing;
    s_.counts.num_probes = num_probes;
    s_.counts.num_lookups = num_places;
    s_.counts.num_known = num_places - s_.num_missing;
  }

  void InsertMissing() {
    FirstOccurrences first_occurrences(s_.slots);
    const auto key_of = [&](uint32_t i) {
      return keys_[s_.places[i].position];
    };
    for (int64_t i = 0; i < s_.num_missing; ++i) {
      const auto number = static_cast<uint32_t>(i);
      const uint32_t first =
          first_occurrences.Add(key_of(number), number, key_of);
      s_.missing[i] = {first, 0};
      ++s_.missing[first].times;
    }
    for (int64_t i = 0; i < s_.num_missing; ++i) {
      const KeyPlace place = s_.places[i];
      const Missing& missing = s_.missing[i];
      if (missing.first != i) {
        rows_[place.position] = rows_[s_.places[missing.first].position];
      } else if (!Insert(place, missing.times)) {
        return;
      }
    }
  }

  void TakeBack() {
    for (int64_t i = s_.num_old_lanes - 1; i >= 0; --i) {
      const OldLane& old = s_.old_lanes[i];
      SetLane(old.row, old.key, old.last_step, old.count);
    }
  }

 private:
  // False if the step has to be refused.
  bool Insert(const KeyPlace& place, int64_t times) {
    const int64_t key = keys_[place.position];
    if (!IsAdmitted(key, times)) {
      ++s_.counts.num_rejected;
      return true;
    }
    const int64_t row = FindPlace(place.bucket);
    if (row == kNoRow) {
      ++s_.counts.num_full;
      if (!policy_.fails_when_full) return true;
      s_.failed_at = place.position;
      return false;
    }
    const auto bucket = buckets_.at(row / kKeysPerBucket);
    const int64_t lane = row % kKeysPerBucket;
    const int64_t evicted = bucket.keys[lane];
    if (evicted != kEmptyKey) {
      ++s_.counts.num_evicted;
      s_.counts.num_expired +=
          IsExpired(policy_, bucket.last_step[lane], step_.number);
    }
    Remember(row);
    SetLane(row, key, step_.number, 0);
    bucket.count[lane] = static_cast<int32_t>(
        std::min<int64_t>(times, std::numeric_limits<int32_t>::max()));
    s_.new_keys[s_.num_new_keys++] = {row, key, evicted};
    ++s_.counts.num_admitted;
    rows_[place.position] = row;
    return true;
  }

  bool IsAdmitted(int64_t key, int64_t times) {
    switch (policy_.admission) {
      case Admission::kAll:
        break;
      case Admission::kCount:
        return SegmentSketch(s_.sketch, s_.seen).Add(key, times) >=
               policy_.min_count;
      case Admission::kProbability:
        return IsAdmittedByChance(policy_, key, step_.number);
    }
    return true;
  }

  // The row that a new key gets, or kNoRow.
  int64_t FindPlace(int64_t first) const {
    int64_t bucket = first;
    for (int64_t p = 0; p < layout_.num_probes(); ++p) {
      const int lane = FindLane(buckets_.keys(bucket), kEmptyKey);
      if (lane >= 0) return bucket * kKeysPerBucket + lane;
      bucket = layout_.Next(bucket);
    }
    if (policy_.eviction == Eviction::kLru && step_.pinned_rows.empty()) {
      return FindLeastRecent(first);
    }
    return FindLowestScore(first);
  }

  // Of keys that all may go but for their last step. Those that have expired
  // are the least recent ones anyway.
  int64_t FindLeastRecent(int64_t bucket) const {
    int64_t found = kNoRow;
    int32_t oldest = step_.oldest_in_flight;
    for (int64_t p = 0; p < layout_.num_probes(); ++p) {
      const int32_t* last_step = buckets_.at(bucket).last_step;
      int32_t lowest = last_step[0];
      for (int lane = 1; lane < kKeysPerBucket; ++lane) {
        lowest = std::min(lowest, last_step[lane]);
      }
      // Of equal ones the lowest row, and buckets may wrap around.
      if (lowest < oldest || (lowest == oldest && found != kNoRow &&
                              bucket * kKeysPerBucket < found)) {
        int lane = 0;
        while (last_step[lane] != lowest) ++lane;
        found = bucket * kKeysPerBucket + lane;
        oldest = lowest;
      }
      bucket = layout_.Next(bucket);
    }
    return found;
  }

  int64_t FindLowestScore(int64_t bucket) const {
    int64_t found = kNoRow;
    bool found_is_expired = false;
    int32_t found_score = 0;
    for (int64_t p = 0; p < layout_.num_probes(); ++p) {
      const auto at = buckets_.at(bucket);
      for (int lane = 0; lane < kKeysPerBucket; ++lane) {
        const int64_t row = bucket * kKeysPerBucket + lane;
        const int32_t last_step = at.last_step[lane];
        const bool is_expired = IsExpired(policy_, last_step, step_.number);
        if (!is_expired && policy_.eviction == Eviction::kNone) continue;
        if (IsInUse(row, last_step)) continue;
        // Among expired keys the one that expired first.
        const int32_t score =
            is_expired
                ? last_step
                : ScoreOf(policy_, last_step, at.count[lane], step_.number);
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

  void CountUse(int64_t row) {
    const auto bucket = buckets_.at(row / kKeysPerBucket);
    const int64_t lane = row % kKeysPerBucket;
    int32_t& last_step = bucket.last_step[lane];
    int32_t& count = bucket.count[lane];
    if (last_step != step_.number) {
      Remember(row);
      count = DecayedCount(policy_, count, int64_t{step_.number} - last_step);
      last_step = step_.number;
    }
    if (count < std::numeric_limits<int32_t>::max()) ++count;
  }

  void SetLane(int64_t row, int64_t key, int32_t last_step, int32_t count) {
    const auto bucket = buckets_.at(row / kKeysPerBucket);
    const int64_t lane = row % kKeysPerBucket;
    bucket.keys[lane] = key;
    bucket.last_step[lane] = last_step;
    bucket.count[lane] = count;
  }

  void Remember(int64_t row) {
    if (s_.old_lanes.empty()) return;
    const auto bucket = buckets_.at(row / kKeysPerBucket);
    const int64_t lane = row % kKeysPerBucket;
    s_.old_lanes[s_.num_old_lanes++] = {
        row, bucket.keys[lane], bucket.last_step[lane], bucket.count[lane]};
  }

  const BucketLayout& layout_;
  const VocabularyPolicy& policy_;
  const VocabularyStep& step_;
  const Buckets<Locate>& buckets_;
  const Span<const int64_t> keys_;
  const Span<int64_t> rows_;
  SegmentKeys& s_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_VOCABULARY_ADMIT_SEGMENT_H_
