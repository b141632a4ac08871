// Groups the keys of a batch by the segments of a vocabulary.

#ifndef TF_LAYOUTMAP_CORE_KEYS_KEYS_BY_SEGMENT_H_
#define TF_LAYOUTMAP_CORE_KEYS_KEYS_BY_SEGMENT_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/memory/raw_array.h"
#include "cc/core/simd/key_kernels.h"

namespace layoutmap {

// Assigns contiguous places to the keys of each segment, in the order of the
// batch. The workers of different segments then access different memory. The
// batch is processed in parts, so that several workers can assign places.
class SegmentPlaces {
 public:
  SegmentPlaces(int64_t num_segments, int64_t num_keys)
      : num_segments_(num_segments),
        num_keys_(num_keys),
        num_parts_((num_keys + kKeysPerPart - 1) / kKeysPerPart),
        first_places_(num_parts_ * num_segments) {}

  // Calls `count(part, begin, end, counts)` for each part, which contains the
  // keys [begin, end). The call must add the number of keys of each segment to
  // `counts`. Then computes the places.
  template <typename Count>
  void Assign(const ParallelFor& parallel_for, int64_t nanoseconds_per_key,
              const Count& count) {
    ForParts(parallel_for, nanoseconds_per_key, first_places_.data(), count);
    SumCounts();
  }

  // Distance in places of the prefetches in `visit` functions that write to
  // places. The writes to a segment are sequential, but a processor cannot
  // detect as many sequences as there are segments.
  static constexpr int64_t kPlacesAhead = 16;

  // Calls `visit(i, segments[i], place)` for each key. `segments` must contain
  // the segment of each key.
  template <typename Visit>
  void ForKeys(const ParallelFor& parallel_for, int64_t nanoseconds_per_key,
               const uint8_t* segments, const Visit& visit) const {
    ForParts(parallel_for, nanoseconds_per_key, first_places_.data(),
             [&](int64_t, int64_t begin, int64_t end, const uint32_t* first) {
               uint32_t next[BucketLayout::kMaxSegments];
               std::copy_n(first, num_segments_, next);
               for (int64_t i = begin; i < end; ++i) {
                 visit(i, segments[i], next[segments[i]]++);
               }
             });
  }

  int64_t num_parts() const { return num_parts_; }
  // Returns the number of keys of a segment.
  int64_t size(int64_t segment) const {
    return splits_[segment + 1] - splits_[segment];
  }
  // Returns the place of the first key of a segment.
  int64_t first(int64_t segment) const { return splits_[segment]; }

 private:
  // Number of keys in a part of the batch.
  static constexpr int64_t kKeysPerPart = 4096;

  // Calls `work(part, begin, end, of_part)` for each part. `of_part` points to
  // the values of the part in `first_places`.
  template <typename Value, typename Work>
  void ForParts(const ParallelFor& parallel_for, int64_t nanoseconds_per_key,
                Value* first_places, const Work& work) const {
    parallel_for(num_parts_, nanoseconds_per_key * kKeysPerPart,
                 [&](int64_t first, int64_t last) {
                   for (int64_t part = first; part < last; ++part) {
                     const int64_t begin = part * kKeysPerPart;
                     work(part, begin,
                          std::min(begin + kKeysPerPart, num_keys_),
                          first_places + part * num_segments_);
                   }
                 });
  }

  // Replaces the numbers of keys in `first_places_` by places.
  void SumCounts();

  int64_t num_segments_;
  int64_t num_keys_;
  int64_t num_parts_;
  // For each part, the place of the first key of each segment,
  // [num_parts, num_segments].
  std::vector<uint32_t> first_places_;
  // [num_segments + 1].
  std::vector<int64_t> splits_;
};

// The keys of a batch, grouped by segment.
class KeysBySegment {
 public:
  // Groups `keys`, which must have fewer than 2^32 - 1 values.
  KeysBySegment(const BucketLayout& layout, Span<const int64_t> keys,
                const KeyKernels& kernels, const ParallelFor& parallel_for);

  // The keys in the order of the places. The positions of a segment's keys are
  // ascending.
  Span<const KeyPlace> keys() const { return {keys_.data(), keys_.size()}; }
  const SegmentPlaces& places() const { return places_; }
  // The segment of each key, in the order of the batch.
  const uint8_t* segments() const { return segments_.data(); }
  // Whether the batch contains kEmptyKey.
  bool has_empty_key() const { return has_empty_key_; }

 private:
  RawArray<KeyPlace> keys_;
  RawArray<uint8_t> segments_;
  SegmentPlaces places_;
  bool has_empty_key_ = false;
};

// Finds the first occurrence of each key in a list that may contain duplicates.
class FirstOccurrences {
 public:
  // Returns the number of slots that a list of `num_keys` keys requires.
  static int64_t NumSlots(int64_t num_keys);

  // `slots` must have NumSlots(num_keys) elements and may be uninitialized.
  explicit FirstOccurrences(Span<uint32_t> slots) : slots_(slots) {
    std::fill(slots.begin(), slots.end(), 0);
  }

  // Adds `key` with the number `number`. If an equal key was added before,
  // returns the number of its first occurrence. Otherwise, returns `number`.
  // `key_of(n)` must return the key that was added with the number n.
  template <typename KeyOf>
  uint32_t Add(int64_t key, uint32_t number, const KeyOf& key_of) {
    const uint64_t mask = static_cast<uint64_t>(slots_.size()) - 1;
    // The slot is selected by the low bits. The high bits select the segment
    // and the bucket.
    uint64_t slot = MixBits(static_cast<uint64_t>(key)) & mask;
    while (slots_[slot] != 0 && key_of(slots_[slot] - 1) != key) {
      slot = (slot + 1) & mask;
    }
    if (slots_[slot] == 0) slots_[slot] = number + 1;
    return slots_[slot] - 1;
  }

 private:
  Span<uint32_t> slots_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_KEYS_KEYS_BY_SEGMENT_H_
