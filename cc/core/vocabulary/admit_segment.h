// Admits the keys of one segment in a training step.

#ifndef TF_LAYOUTMAP_CORE_VOCABULARY_ADMIT_SEGMENT_H_
#define TF_LAYOUTMAP_CORE_VOCABULARY_ADMIT_SEGMENT_H_

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cc/core/base/views.h"
#include "cc/core/ids/row_groups.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/keys_by_segment.h"
#include "cc/core/keys/policy.h"
#include "cc/core/keys/row_uses.h"
#include "cc/core/keys/sketch.h"
#include "cc/core/simd/key_kernels.h"
#include "cc/core/vocabulary/admit_keys.h"
#include "cc/core/vocabulary/free_place.h"
#include "cc/core/vocabulary/segment_buckets.h"

namespace layoutmap {

// The previous values of a lane, which are required to undo a step.
struct OldLane {
  int64_t row;
  int64_t key;
  int32_t last_step;
  int32_t count;
};

// A key of the batch that has no row.
struct Missing {
  // Index of the key's first occurrence among the keys without a row.
  uint32_t first;
  // Number of occurrences. Only valid for the first occurrence.
  uint32_t times;
  // Index of the key among all keys of the segment.
  uint32_t place;
};

// The keys of one segment and the results of the step for these keys. All
// memory is allocated before the workers start, so that the call returns an
// error if an allocation fails.
struct SegmentKeys {
  // At first, the places of all keys. Later, the places of the keys without a
  // row.
  Span<KeyPlace> places;
  // The rows of all keys.
  Span<int64_t> rows;
  Span<Missing> missing;  // Same size as `places`.
  // Memory of FirstOccurrences.
  Span<uint32_t> slots;
  Span<RowUse> uses;        // Same size as `places`.
  Span<RowUse> spare_uses;  // Same size as `places`.
  Span<NewKey> new_keys;    // Same size as `places`.
  // Empty, or two elements per key.
  Span<OldLane> old_lanes;
  Span<uint8_t> sketch;
  int64_t* seen = nullptr;
  RowGroups* groups = nullptr;
  RowGroups::Part part = {};
  int64_t first_row = 0;
  int64_t num_uses = 0;
  int64_t num_missing = 0;
  int64_t num_new_keys = 0;
  int64_t num_old_lanes = 0;
  // Position of the first key for which no row is free.
  int64_t failed_at = std::numeric_limits<int64_t>::max();
  VocabularyCounts counts;
};

// Runs the step for one segment. `Segment` is one of the classes in
// cc/core/vocabulary/segment_buckets.h.
template <typename Segment>
class AdmitSegment {
 public:
  AdmitSegment(const BucketLayout& layout, const VocabularyPolicy& policy,
               const VocabularyStep& step, const Segment& segment,
               SegmentKeys* keys)
      : layout_(layout),
        policy_(policy),
        step_(step),
        segment_(segment),
        s_(*keys) {}

  // Counts the uses of keys that have a row. Then inserts the other keys, while
  // the segment is still in the cache.
  void Run() {
    FindKnown();
    SortUses(num_rows(), s_.num_uses, &s_.uses, &s_.spare_uses);
    ForRowsOfUses(s_.uses.data(), s_.num_uses,
                  [&](int64_t row, int64_t first, int64_t last) {
                    CountUses(s_.first_row + row, last - first);
                  });
    InsertMissing();
    WriteGroups();
  }

 private:
  // Returns the number of rows of the segment.
  int64_t num_rows() const {
    return layout_.buckets_per_segment() * kKeysPerBucket;
  }

  // Finds the keys that have a row, and collects the places of the other keys.
  void FindKnown() {
    // The loop processes blocks of keys, so that the results of a block are
    // still in the first-level cache when they are read.
    constexpr int64_t kBlock = 64;
    const int64_t num_places = s_.places.size();
    RowUse* uses = s_.uses.data();
    int64_t num_uses = 0, num_missing = 0;
    for (int64_t begin = 0; begin < num_places; begin += kBlock) {
      const int64_t end = std::min(begin + kBlock, num_places);
      segment_.PrefetchNext(begin, end, num_places);
      s_.counts.num_probes +=
          segment_.Find(s_.places.data() + begin, end - begin, num_places - end,
                        s_.rows.data() + begin);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = s_.rows[i];
        if (row != kNoRow) {
          uses[num_uses++] =
              MakeRowUse(row - s_.first_row, s_.places[i].position);
          continue;
        }
        s_.places[num_missing] = s_.places[i];
        s_.missing[num_missing++] = {0, 0, static_cast<uint32_t>(i)};
      }
    }
    s_.num_uses = num_uses;
    s_.num_missing = num_missing;
    s_.counts.num_lookups = num_places;
    s_.counts.num_known = num_uses;
  }

  void InsertMissing() {
    if (s_.num_missing == 0) return;
    FirstOccurrences first_occurrences(
        {s_.slots.data(), FirstOccurrences::NumSlots(s_.num_missing)});
    const auto key_of = [&](uint32_t i) { return s_.places[i].key; };
    for (int64_t i = 0; i < s_.num_missing; ++i) {
      const auto number = static_cast<uint32_t>(i);
      const uint32_t first =
          first_occurrences.Add(key_of(number), number, key_of);
      s_.missing[i].first = first;
      ++s_.missing[first].times;
    }
    const int64_t num_known = s_.num_uses;
    constexpr int64_t kPlacesAhead = 8;
    for (int64_t i = 0; i < s_.num_missing; ++i) {
      if (i + kPlacesAhead < s_.num_missing) {
        segment_.Prefetch(s_.places[i + kPlacesAhead].bucket);
      }
      const Missing& missing = s_.missing[i];
      int64_t& row = s_.rows[missing.place];
      if (missing.first != i) {
        row = s_.rows[s_.missing[missing.first].place];
      } else if (!Insert(s_.places[i], missing)) {
        return;
      }
      if (row == kNoRow) continue;
      s_.uses[s_.num_uses++] =
          MakeRowUse(row - s_.first_row, s_.places[i].position);
    }
    SortAddedUses(num_rows(), num_known, s_.num_uses, &s_.uses, &s_.spare_uses);
  }

  void WriteGroups() {
    const int64_t begin = s_.part.first;
    uint32_t* const rows = s_.groups->rows.data() + begin;
    uint32_t* const starts = s_.groups->starts.data() + begin;
    uint32_t* const positions = s_.groups->positions.data() + begin;
    int64_t num_rows = 0;
    ForRowsOfUses(s_.uses.data(), s_.num_uses,
                  [&](int64_t row, int64_t first, int64_t) {
                    rows[num_rows] = static_cast<uint32_t>(s_.first_row + row);
                    starts[num_rows++] = static_cast<uint32_t>(first);
                  });
    for (int64_t i = 0; i < s_.num_uses; ++i) {
      positions[i] = PositionOfUse(s_.uses[i]);
    }
    s_.part.num_rows = num_rows;
    s_.part.num_positions = s_.num_uses;
  }

  // Inserts a key if the policy admits it. Returns false if the step must fail.
  bool Insert(const KeyPlace& place, const Missing& missing) {
    if (!IsAdmitted(place.key, missing.times)) {
      ++s_.counts.num_rejected;
      return true;
    }
    const int64_t row =
        FreePlace(layout_, policy_, step_, segment_).Find(place.bucket);
    if (row == kNoRow) {
      ++s_.counts.num_full;
      if (!policy_.fails_when_full) return true;
      s_.failed_at = place.position;
      return false;
    }
    const Lane lane = segment_.At(row);
    const int64_t evicted = *lane.key;
    if (evicted != kEmptyKey) {
      ++s_.counts.num_evicted;
      s_.counts.num_expired +=
          IsExpired(policy_, *lane.last_step, step_.number);
    }
    Remember(row, lane);
    SetLane(lane, place.key, step_.number,
            static_cast<int32_t>(std::min<int64_t>(
                missing.times, std::numeric_limits<int32_t>::max())));
    s_.new_keys[s_.num_new_keys++] = {row, place.key, evicted};
    ++s_.counts.num_admitted;
    s_.rows[missing.place] = row;
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

  void CountUses(int64_t row, int64_t times) {
    const Lane lane = segment_.At(row);
    int32_t& last_step = *lane.last_step;
    int32_t& count = *lane.count;
    if (last_step != step_.number) {
      Remember(row, lane);
      count = DecayedCount(policy_, count, int64_t{step_.number} - last_step);
      last_step = step_.number;
    }
    count = static_cast<int32_t>(
        std::min<int64_t>(count + times, std::numeric_limits<int32_t>::max()));
  }

  static void SetLane(const Lane& lane, int64_t key, int32_t last_step,
                      int32_t count) {
    *lane.key = key;
    *lane.last_step = last_step;
    *lane.count = count;
  }

  void Remember(int64_t row, const Lane& lane) {
    if (s_.old_lanes.empty()) return;
    s_.old_lanes[s_.num_old_lanes++] = {row, *lane.key, *lane.last_step,
                                        *lane.count};
  }

  const BucketLayout& layout_;
  const VocabularyPolicy& policy_;
  const VocabularyStep& step_;
  const Segment& segment_;
  SegmentKeys& s_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_VOCABULARY_ADMIT_SEGMENT_H_
