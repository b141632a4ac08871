#include "cc/core/vocabulary/admit_keys.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/row_groups.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/keys_by_segment.h"
#include "cc/core/keys/policy.h"
#include "cc/core/keys/row_uses.h"
#include "cc/core/keys/sketch.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/core/memory/raw_array.h"
#include "cc/core/simd/key_kernels.h"
#include "cc/core/vocabulary/admit_segment.h"
#include "cc/core/vocabulary/batch_search.h"
#include "cc/core/vocabulary/segment_buckets.h"

namespace layoutmap {
namespace {

using std::to_string;

// The values of the state before a step changed them.
struct OldVocabulary {
  RawArray<OldLane> lanes;
  // For each segment, the lanes that the step changed, in the order of the
  // changes.
  std::vector<Span<const OldLane>> changed;
  std::vector<uint8_t> sketch;
  std::vector<int64_t> seen;

  void Restore(const VocabularyState& state) const {
    WithBuckets(state, [&](const auto& buckets) {
      for (const Span<const OldLane> segment : changed) {
        for (int64_t i = segment.size() - 1; i >= 0; --i) {
          const OldLane& old = segment[i];
          const auto bucket = buckets.at(old.row / kKeysPerBucket);
          const int64_t lane = old.row % kKeysPerBucket;
          bucket.keys[lane] = old.key;
          bucket.last_step[lane] = old.last_step;
          bucket.count[lane] = old.count;
        }
      }
    });
    std::copy(sketch.begin(), sketch.end(), state.sketch.begin());
    std::copy(seen.begin(), seen.end(), state.seen.begin());
  }
};

// Returns whether many keys of the batch may have no row. The result depends on
// a sample, and only affects the speed.
bool MayHaveManyNew(const BucketLayout& layout,
                    const std::vector<const int64_t*>& lanes,
                    Span<const int64_t> keys) {
  constexpr int64_t kSampleSize = 256;
  constexpr int64_t kMaxNew = kSampleSize / 8;
  const int64_t size = std::min(kSampleSize, keys.size());
  const int64_t per_sample = keys.size() / std::max<int64_t>(size, 1);
  const int64_t first_of = layout.buckets_per_segment();
  const auto keys_of = [&](int64_t bucket) {
    const int64_t segment = layout.SegmentOf(bucket);
    return lanes[segment] + (bucket - segment * first_of) * kKeysPerBucket;
  };
  int64_t num_new = 0, num_probes = 0;
  for (int64_t i = 0; i < size; ++i) {
    // The remainders keep the sample from having a regular pattern.
    const int64_t key = keys[keys.size() * i / size + i * 5 % per_sample];
    num_new += FindRow(layout, keys_of, layout.BucketOf(key), key,
                       &num_probes) == kNoRow;
  }
  return num_new > kMaxNew;
}

// Admits the keys of one step. The methods are the phases of the step and are
// called one after the other.
class KeyAdmission {
 public:
  KeyAdmission(const BucketLayout& layout, const VocabularyPolicy& policy,
               const VocabularyStep& step, Span<const int64_t> keys,
               const ParallelFor& parallel_for, const VocabularyState& state,
               const KeyKernels& kernels)
      : layout_(layout),
        policy_(policy),
        step_(step),
        keys_(keys),
        parallel_for_(parallel_for),
        state_(state),
        kernels_(kernels),
        segments_(layout.num_segments()) {}

  Status Run(Span<int64_t> rows, AdmittedKeys* admitted) {
    Group();
    if (search_ != nullptr ? search_->has_empty_key()
                           : grouped_->has_empty_key()) {
      return EmptyKeyError();
    }
    Prepare();
    RunSegments();
    if (old_ != nullptr) {
      for (const SegmentKeys& segment : segments_) {
        old_->changed.push_back(
            {segment.old_lanes.data(), segment.num_old_lanes});
      }
    }
    int64_t failed_at = std::numeric_limits<int64_t>::max();
    for (const SegmentKeys& segment : segments_) {
      failed_at = std::min(failed_at, segment.failed_at);
    }
    if (failed_at < keys_.size()) {
      old_->Restore(state_);
      return FailedPrecondition(
          "Key " + to_string(keys_[failed_at]) + " has no free row: all " +
          to_string(layout_.num_probes() * kKeysPerBucket) +
          " rows of its buckets are in use, of " +
          to_string(layout_.num_rows()) +
          " in the vocabulary. Increase `capacity`, or set on_full=\"evict\" "
          "with an eviction rule");
    }
    WriteRows(rows);
    Collect(admitted);
    return Status();
  }

  std::shared_ptr<const OldVocabulary> old() const { return old_; }

 private:
  Status EmptyKeyError() const {
    const auto bad = std::find(keys_.begin(), keys_.end(), kEmptyKey);
    return InvalidArgument("A key must not be " + to_string(kEmptyKey) +
                           ", which marks rows without a key. Received: this "
                           "value at index " +
                           to_string(bad - keys_.begin()));
  }

  // Groups the keys by segment.
  void Group() {
    if (step_.search != SearchOrder::kBySegment) {
      const std::vector<const int64_t*> lanes =
          BatchSearch::LanesOfSegments(layout_, state_);
      if (!lanes.empty() && (step_.search == SearchOrder::kByBatch ||
                             !MayHaveManyNew(layout_, lanes, keys_))) {
        search_ = std::make_unique<BatchSearch>(layout_, lanes, keys_, kernels_,
                                                parallel_for_);
        return;
      }
    }
    grouped_ = std::make_unique<KeysBySegment>(layout_, keys_, kernels_,
                                               parallel_for_);
  }

  const SegmentPlaces& places() const {
    return search_ != nullptr ? search_->places() : grouped_->places();
  }

  // Writes the rows of all keys in the order of the batch.
  void WriteRows(Span<int64_t> rows) const {
    constexpr int64_t kNanosecondsPerKey = 2;
    const int64_t rows_per_segment =
        layout_.buckets_per_segment() * kKeysPerBucket;
    const auto write = [&](int64_t i, int64_t segment, uint32_t row) {
      rows[i] =
          row == kNoRelativeRow ? kNoRow : segment * rows_per_segment + row;
    };
    if (search_ == nullptr) {
      places().ForKeys(parallel_for_, kNanosecondsPerKey, grouped_->segments(),
                       [&](int64_t i, int64_t segment, uint32_t place) {
                         __builtin_prefetch(rows_.data() + place +
                                            SegmentPlaces::kPlacesAhead);
                         write(i, segment, rows_[place]);
                       });
      return;
    }
    const uint8_t* const segments = search_->segments();
    parallel_for_(keys_.size(), kNanosecondsPerKey,
                  [&](int64_t begin, int64_t end) {
                    for (int64_t i = begin; i < end; ++i) {
                      write(i, segments[i], rows_[i]);
                    }
                  });
  }

  void Prepare() {
    const int64_t num_keys = keys_.size();
    const bool keeps_old = policy_.fails_when_full || step_.keeps_old;
    if (keeps_old) {
      old_ = std::make_shared<OldVocabulary>();
      old_->lanes = RawArray<OldLane>(2 * num_keys);
      old_->changed.reserve(segments_.size());
      old_->sketch.assign(state_.sketch.begin(), state_.sketch.end());
      old_->seen.assign(state_.seen.begin(), state_.seen.end());
    }
    if (search_ == nullptr) {
      places_rows_ = RawArray<uint32_t>(num_keys);
      rows_ = places_rows_;
    } else {
      rows_ = search_->rows();
    }
    missing_ = RawArray<Missing>(num_keys);
    uses_ = RawArray<RowUse>(2 * num_keys);
    next_ = RawArray<uint32_t>(num_keys);
    groups_ = std::make_shared<RowGroups>(num_keys);
    new_keys_ = std::make_shared<RawArray<NewKey>>(num_keys);
    const bool has_sketch = policy_.admission == Admission::kCount;
    const int64_t num_cells = 2 * SegmentSketch::NumCells(layout_);
    const int64_t rows_per_segment =
        layout_.buckets_per_segment() * kKeysPerBucket;
    // For each 64 rows, the time of the bitmap is about the time in which one
    // key is sorted.
    const int64_t num_words = (rows_per_segment + 63) / 64;
    const int64_t num_segments = layout_.num_segments();
    const bool has_bitmaps = num_segments * num_words <= num_keys;
    words_per_segment_ = has_bitmaps ? num_words : 0;
    used_ = RawArray<uint64_t>(num_segments * words_per_segment_);
    ranks_ = RawArray<uint32_t>(num_segments * words_per_segment_);
    first_slots_ = {0};
    int64_t begin = 0;
    for (int64_t s = 0; s < num_segments; ++s) {
      SegmentKeys& segment = segments_[s];
      const int64_t size = places().size(s);
      segment.size = size;
      segment.groups = groups_.get();
      segment.part = {begin, 0, 0};
      segment.first_row = s * rows_per_segment;
      segment.new_keys = {new_keys_->data() + begin, size};
      first_slots_.push_back(first_slots_[s] +
                             FirstOccurrences::NumSlots(size));
      if (keeps_old) {
        segment.old_lanes = {old_->lanes.data() + 2 * begin, 2 * size};
      }
      if (has_sketch && state_.HasSegment(layout_, s)) {
        const int64_t here = s - state_.first_segment;
        segment.sketch = {state_.sketch.data() + here * num_cells, num_cells};
        segment.seen = &state_.seen[here];
      }
      begin += size;
    }
    slots_ = RawArray<uint32_t>(first_slots_.back());
  }

  // Gives segment `s` the memory that starts with the memory of segment
  // `first`, which the same worker processed before. This memory is still in a
  // cache, and it is large enough because it also contains the memory of
  // segment `s`.
  void TakeScratch(int64_t first, int64_t s) {
    SegmentKeys& segment = segments_[s];
    const int64_t begin = segments_[first].part.first;
    const int64_t size = segment.size;
    segment.missing = {missing_.data() + begin, size};
    segment.uses = {uses_.data() + 2 * begin, size};
    segment.spare_uses = {uses_.data() + 2 * begin + size, size};
    segment.next = {next_.data() + begin, size};
    segment.used = {used_.data() + first * words_per_segment_,
                    words_per_segment_};
    segment.ranks = {ranks_.data() + first * words_per_segment_,
                     words_per_segment_};
    segment.slots = {slots_.data() + first_slots_[first],
                     FirstOccurrences::NumSlots(size)};
  }

  void RunSegments() {
    constexpr int64_t kNanosecondsPerKey = 20;
    const int64_t num_segments = layout_.num_segments();
    const int64_t cost = 1 + kNanosecondsPerKey * keys_.size() / num_segments;
    WithBuckets(state_, [&](const auto& buckets) {
      parallel_for_(num_segments, cost, [&](int64_t begin, int64_t end) {
        for (int64_t s = begin; s < end; ++s) {
          if (segments_[s].size == 0) continue;
          TakeScratch(begin, s);
          WithSegment(layout_, buckets, kernels_, s, [&](const auto& segment) {
            AdmitSegment admit(layout_, policy_, step_, kernels_, segment,
                               rows_, &segments_[s]);
            const int64_t first = places().first(s);
            const int64_t size = places().size(s);
            if (search_ != nullptr) {
              admit.TakeFound({search_->uses().data() + first, size}, keys_);
            } else {
              admit.FindKnown({grouped_->keys().data() + first, size}, first);
            }
            admit.Run();
          });
        }
      });
    });
  }

  void Collect(AdmittedKeys* admitted) {
    *admitted = AdmittedKeys();
    // The loop moves the new keys of each segment, so that they follow the new
    // keys of the preceding segment.
    NewKey* end = new_keys_->data();
    VocabularyCounts& total = admitted->counts;
    if (search_ != nullptr) total.num_probes = search_->num_probes();
    groups_->parts.reserve(segments_.size());
    for (const SegmentKeys& segment : segments_) {
      groups_->parts.push_back(segment.part);
      const NewKey* first = segment.new_keys.data();
      if (first == end) {
        end += segment.num_new_keys;
      } else {
        end = std::copy(first, first + segment.num_new_keys, end);
      }
      total.num_lookups += segment.counts.num_lookups;
      total.num_known += segment.counts.num_known;
      total.num_probes += segment.counts.num_probes;
      total.num_admitted += segment.counts.num_admitted;
      total.num_rejected += segment.counts.num_rejected;
      total.num_full += segment.counts.num_full;
      total.num_evicted += segment.counts.num_evicted;
      total.num_expired += segment.counts.num_expired;
    }
    admitted->new_keys = {new_keys_->data(), end - new_keys_->data()};
    admitted->new_keys_memory = new_keys_;
    admitted->groups = groups_;
  }

  const BucketLayout& layout_;
  const VocabularyPolicy& policy_;
  const VocabularyStep& step_;
  const Span<const int64_t> keys_;
  const ParallelFor& parallel_for_;
  const VocabularyState& state_;
  const KeyKernels& kernels_;
  // One of these two pointers is not null.
  std::unique_ptr<KeysBySegment> grouped_;
  std::unique_ptr<BatchSearch> search_;
  std::vector<SegmentKeys> segments_;
  // The rows relative to the first row of their segment. They are in the order
  // of `search_` or of `grouped_`. In the second case, `places_rows_` is their
  // memory.
  Span<uint32_t> rows_;
  RawArray<uint32_t> places_rows_;
  // In these arrays, the elements of a segment are contiguous.
  RawArray<Missing> missing_;
  RawArray<RowUse> uses_;
  RawArray<uint32_t> next_;
  RawArray<uint64_t> used_;
  RawArray<uint32_t> ranks_;
  int64_t words_per_segment_ = 0;
  std::shared_ptr<RowGroups> groups_;
  std::shared_ptr<RawArray<NewKey>> new_keys_;
  RawArray<uint32_t> slots_;
  std::vector<int64_t> first_slots_;
  std::shared_ptr<OldVocabulary> old_;
};

Status CheckStep(const BucketLayout& layout, const VocabularyPolicy& policy,
                 const VocabularyStep& step, Span<const int64_t> keys,
                 const VocabularyState& state) {
  LM_RETURN_IF_ERROR(CheckPolicy(policy));
  if (step.number < 1 || step.oldest_in_flight > step.number) {
    return InvalidArgument(
        "The number of a step must be at least 1 and at least the number of "
        "the oldest step in flight. Received: step " +
        to_string(step.number) + ", oldest in flight " +
        to_string(step.oldest_in_flight));
  }
  if (keys.size() > std::numeric_limits<uint32_t>::max() - 1) {
    return InvalidArgument(
        "A step must have at most 2^32 - 2 keys. Received: " +
        to_string(keys.size()));
  }
  if (policy.admission != Admission::kCount) return Status();
  const int64_t num_segments = state.NumSegments(layout);
  const int64_t num_cells = 2 * SegmentSketch::NumCells(layout) * num_segments;
  if (state.sketch.size() != num_cells || state.seen.size() != num_segments) {
    return InvalidArgument(
        "The sketch of a vocabulary with " + to_string(layout.num_buckets()) +
        " buckets must have " + to_string(num_cells) + " cells and " +
        to_string(num_segments) +
        " sums. Received: " + to_string(state.sketch.size()) + " and " +
        to_string(state.seen.size()));
  }
  return Status();
}

}  // namespace

Status AdmitKeys(const BucketLayout& layout, const VocabularyPolicy& policy,
                 const VocabularyStep& step, Span<const int64_t> keys,
                 const ParallelFor& parallel_for, const VocabularyState& state,
                 Span<int64_t> rows, AdmittedKeys* admitted,
                 const KeyKernels& kernels) {
  LM_RETURN_IF_ERROR(CheckStep(layout, policy, step, keys, state));
  KeyAdmission admission(layout, policy, step, keys, parallel_for, state,
                         kernels);
  LM_RETURN_IF_ERROR(admission.Run(rows, admitted));
  if (step.keeps_old) {
    admitted->take_back = [old = admission.old()](const VocabularyState& now) {
      old->Restore(now);
    };
  }
  return Status();
}

}  // namespace layoutmap
