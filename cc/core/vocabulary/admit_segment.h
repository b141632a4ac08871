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
  int64_t key;
  // Position of the key in the batch.
  uint32_t position;
  // The first bucket of the search.
  uint32_t bucket;
  // Index of the key's row in `rows` (see AdmitSegment).
  uint32_t place;
  // Index of the key's first occurrence among the keys without a row.
  uint32_t first;
  // Number of occurrences. Only valid for the first occurrence.
  uint32_t times;
  // Whether one of the buckets may have an empty lane.
  uint32_t may_have_space;
};

// The keys of one segment and the results of the step for these keys. All
// memory is allocated before the workers start, so that the call returns an
// error if an allocation fails.
struct SegmentKeys {
  int64_t size = 0;
  // The spans that have the size `size`.
  Span<Missing> missing;
  Span<RowUse> uses;
  Span<RowUse> spare_uses;
  Span<uint32_t> next;  // Memory of KeyKernels::group.
  Span<NewKey> new_keys;
  // Memory of FirstOccurrences.
  Span<uint32_t> slots;
  // A bitmap of the rows in `uses`, and memory for one value per word. Empty if
  // the batch uses so few rows that sorting them is faster.
  Span<uint64_t> used;
  Span<uint32_t> ranks;
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
  // `rows` contains one row per key in the order in which the keys are
  // searched. Each row is relative to the first row of the key's segment.
  AdmitSegment(const BucketLayout& layout, const VocabularyPolicy& policy,
               const VocabularyStep& step, const KeyKernels& kernels,
               const Segment& segment, Span<uint32_t> rows, SegmentKeys* keys)
      : layout_(layout),
        policy_(policy),
        step_(step),
        kernels_(kernels),
        segment_(segment),
        rows_(rows),
        s_(*keys) {}

  // Finds the keys that have a row, and collects the other keys. `keys` are the
  // keys of the segment, and the index of the first key's row in `rows` is
  // `first`.
  void FindKnown(Span<const KeyPlace> keys, int64_t first) {
    // The results of a block are still in the first-level cache when they are
    // read. The buckets of a block are prefetched while the preceding block is
    // searched.
    constexpr int64_t kBlock = 64;
    const int64_t size = keys.size();
    const auto prefetch = [&](int64_t begin) {
      if (begin >= size) return;
      segment_.PrefetchKeys(keys.data() + begin,
                            std::min(kBlock, size - begin));
    };
    prefetch(0);
    for (int64_t begin = 0; begin < size; begin += kBlock) {
      const int64_t end = std::min(begin + kBlock, size);
      prefetch(end);
      segment_.PrefetchNext(begin, end, size);
      FindBlock<kBlock>(keys, begin, end, first);
    }
  }

  // Uses the result of a `BatchSearch` instead of finding the keys. `found`
  // contains the rows of the segment's keys, and is overwritten. `keys`
  // contains all keys in the batch.
  void TakeFound(Span<RowUse> found, Span<const int64_t> keys) {
    s_.uses = found;
    RowUse* const uses = found.data();
    int64_t num_uses = 0;
    for (int64_t k = 0; k < found.size(); ++k) {
      const RowUse use = uses[k];
      const int64_t row = RowOfUse(use);
      // This branch is rarely taken, because most keys have a row if the step
      // uses a `BatchSearch`.
      if (row >= kNoRowButSpace) {
        AddMissing(keys, PositionOfUse(use), row == kNoRowButSpace);
        continue;
      }
      uses[num_uses++] = use;
    }
    s_.num_uses = num_uses;
  }

  // Marks the rows of the known keys as used in this step. Then inserts the
  // other keys, while the segment is still in the cache, and counts the uses of
  // all rows.
  void Run() {
    s_.counts.num_lookups = s_.size;
    s_.counts.num_known = s_.num_uses;
    const int64_t num_known = s_.num_uses;
    if (s_.used.empty()) {
      SortUses(num_rows(), num_known, &s_.uses, &s_.spare_uses);
    } else {
      std::fill(s_.used.begin(), s_.used.end(), 0);
      for (int64_t k = 0; k < num_known; ++k) SetUsed(s_.uses[k]);
    }
    MarkUsedRows();
    if (!InsertMissing()) return;
    if (s_.used.empty()) {
      SortAddedUses(num_rows(), num_known, s_.num_uses, &s_.uses,
                    &s_.spare_uses);
    }
    WriteGroups();
    CountUses();
  }

 private:
  // Returns the number of rows of the segment.
  int64_t num_rows() const {
    return layout_.buckets_per_segment() * kKeysPerBucket;
  }

  template <int64_t kBlock>
  void FindBlock(Span<const KeyPlace> keys, int64_t begin, int64_t end,
                 int64_t first) {
    MissedKey missed[kBlock];
    const KeyPlace* const places = keys.data();
    uint32_t* const rows = rows_.data() + first;
    const int64_t num_missed =
        segment_.Find(places + begin, end - begin, rows + begin, missed,
                      &s_.counts.num_probes);
    RowUse* const uses = s_.uses.data();
    int64_t num_uses = s_.num_uses;
    for (int64_t i = begin; i < end; ++i) {
      uses[num_uses] = MakeRowUse(rows[i], places[i].position);
      num_uses += rows[i] != kNoRelativeRow;
    }
    s_.num_uses = num_uses;
    for (int64_t j = 0; j < num_missed; ++j) {
      const int64_t i = begin + missed[j].index;
      s_.missing[s_.num_missing++] = {places[i].key,
                                      places[i].position,
                                      places[i].bucket,
                                      static_cast<uint32_t>(first + i),
                                      0,
                                      0,
                                      missed[j].may_have_space};
    }
  }

  void AddMissing(Span<const int64_t> keys, uint32_t position,
                  bool may_have_space) {
    const int64_t key = keys[position];
    s_.missing[s_.num_missing++] = {
        key,           position, static_cast<uint32_t>(layout_.BucketOf(key)),
        position,      0,        0,
        may_have_space};
    // The search returned one of two values for keys without a row. The other
    // code expects one value.
    rows_[position] = kNoRelativeRow;
  }

  void SetUsed(RowUse use) {
    const int64_t row = RowOfUse(use);
    s_.used[row >> 6] |= uint64_t{1} << (row & 63);
  }

  // Stores the number of the step for the rows in `uses`, and lets their counts
  // decay.
  void MarkUsedRows() {
    if (s_.used.empty()) {
      constexpr int64_t kUsesAhead = 32;
      const RowUse* const uses = s_.uses.data();
      ForRowsOfUses(
          uses, s_.num_uses, [&](int64_t row, int64_t first, int64_t) {
            const int64_t ahead = std::min(first + kUsesAhead, s_.num_uses - 1);
            segment_.PrefetchToWrite(s_.first_row + RowOfUse(uses[ahead]));
            MarkUsed(row);
          });
      return;
    }
    constexpr int64_t kWordsAhead = 16;
    constexpr int64_t kStepsPerLine = 64 / sizeof(int32_t);
    const int64_t num_words = s_.used.size();
    for (int64_t w = 0; w < num_words; ++w) {
      if (w + kWordsAhead < num_words) {
        const int64_t ahead = s_.first_row + (w + kWordsAhead) * 64;
        for (int64_t i = 0; i < 64; i += kStepsPerLine) {
          segment_.PrefetchToWrite(ahead + i);
        }
      }
      for (uint64_t bits = s_.used[w]; bits != 0; bits &= bits - 1) {
        MarkUsed(w * 64 + __builtin_ctzll(bits));
      }
    }
  }

  void MarkUsed(int64_t relative_row) {
    const int64_t row = s_.first_row + relative_row;
    const Lane lane = segment_.At(row);
    int32_t& last_step = *lane.last_step;
    if (last_step == step_.number) return;
    Remember(row, lane);
    if (policy_.half_life_steps > 0) {
      *lane.count =
          DecayedCount(policy_, *lane.count, int64_t{step_.number} - last_step);
    }
    last_step = step_.number;
  }

  // Returns false if the step must fail.
  bool InsertMissing() {
    if (s_.num_missing == 0) return true;
    FindFirstOccurrences();
    constexpr int64_t kAhead = 8;
    for (int64_t i = 0; i < s_.num_missing; ++i) {
      if (i + kAhead < s_.num_missing) {
        segment_.Prefetch(s_.missing[i + kAhead].bucket);
      }
      const Missing& missing = s_.missing[i];
      uint32_t row;
      if (missing.first != i) {
        row = rows_[s_.missing[missing.first].place];
      } else if (!Insert(missing, &row)) {
        return false;
      }
      if (row == kNoRelativeRow) continue;
      rows_[missing.place] = row;
      s_.uses[s_.num_uses++] = MakeRowUse(row, missing.position);
    }
    return true;
  }

  void FindFirstOccurrences() {
    FirstOccurrences first_occurrences(
        {s_.slots.data(), FirstOccurrences::NumSlots(s_.num_missing)});
    const auto key_of = [&](uint32_t i) { return s_.missing[i].key; };
    for (int64_t i = 0; i < s_.num_missing; ++i) {
      const auto number = static_cast<uint32_t>(i);
      const uint32_t first =
          first_occurrences.Add(key_of(number), number, key_of);
      s_.missing[i].first = first;
      ++s_.missing[first].times;
    }
  }

  // Writes the rows in `uses` to `groups`.
  void WriteGroups() {
    const int64_t begin = s_.part.first;
    uint32_t* const rows = s_.groups->rows.data() + begin;
    uint32_t* const starts = s_.groups->starts.data() + begin;
    uint32_t* const positions = s_.groups->positions.data() + begin;
    s_.part.num_positions = s_.num_uses;
    if (!s_.used.empty()) {
      s_.part.num_rows = kernels_.group(
          {s_.uses.data(), s_.num_uses, static_cast<uint32_t>(s_.first_row),
           s_.used.data(), s_.used.size(), s_.ranks.data(), s_.next.data(),
           rows, starts, positions});
      return;
    }
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
  }

  // Adds the uses of each row in `groups` to its count.
  void CountUses() {
    constexpr int64_t kRowsAhead = 32;
    const uint32_t* const rows = s_.groups->rows.data() + s_.part.first;
    const uint32_t* const starts = s_.groups->starts.data() + s_.part.first;
    const int64_t num_rows = s_.part.num_rows;
    for (int64_t u = 0; u < num_rows; ++u) {
      const int64_t ahead = std::min(u + kRowsAhead, num_rows - 1);
      __builtin_prefetch(segment_.At(rows[ahead]).count, /*write=*/1,
                         /*locality=*/2);
      const int64_t end = u + 1 < num_rows ? starts[u + 1] : s_.num_uses;
      int32_t& count = *segment_.At(rows[u]).count;
      count = static_cast<int32_t>(std::min<int64_t>(
          count + (end - starts[u]), std::numeric_limits<int32_t>::max()));
    }
  }

  // Inserts a key if the policy admits it. Returns false if the step must fail.
  // Otherwise, sets `relative_row` to the row of the key, or to kNoRelativeRow.
  bool Insert(const Missing& missing, uint32_t* relative_row) {
    *relative_row = kNoRelativeRow;
    if (!IsAdmitted(missing.key, missing.times)) {
      ++s_.counts.num_rejected;
      return true;
    }
    const int64_t row = FreePlace(layout_, policy_, step_, segment_)
                            .Find(missing.bucket, missing.may_have_space != 0);
    if (row == kNoRow) {
      ++s_.counts.num_full;
      if (!policy_.fails_when_full) return true;
      s_.failed_at = missing.position;
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
    *lane.key = missing.key;
    *lane.last_step = step_.number;
    // `CountUses` adds the uses in this step.
    *lane.count = 0;
    s_.new_keys[s_.num_new_keys++] = {row, missing.key, evicted};
    ++s_.counts.num_admitted;
    *relative_row = static_cast<uint32_t>(row - s_.first_row);
    if (!s_.used.empty()) SetUsed(MakeRowUse(*relative_row, 0));
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

  void Remember(int64_t row, const Lane& lane) {
    if (s_.old_lanes.empty()) return;
    s_.old_lanes[s_.num_old_lanes++] = {row, *lane.key, *lane.last_step,
                                        *lane.count};
  }

  const BucketLayout& layout_;
  const VocabularyPolicy& policy_;
  const VocabularyStep& step_;
  const KeyKernels& kernels_;
  const Segment& segment_;
  const Span<uint32_t> rows_;
  SegmentKeys& s_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_VOCABULARY_ADMIT_SEGMENT_H_
