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

// The keys of a batch, grouped by segment, so that the workers of different
// segments access different memory.
class KeysBySegment {
 public:
  // Groups `keys`, which must have fewer than 2^32 - 1 values.
  KeysBySegment(const BucketLayout& layout, Span<const int64_t> keys,
                const KeyKernels& kernels, const ParallelFor& parallel_for);

  // The keys in the order of the places. The positions of a segment's keys are
  // ascending.
  Span<const KeyPlace> places() const {
    return {places_.data(), places_.size()};
  }
  // Returns the number of keys of a segment.
  int64_t size(int64_t segment) const {
    return splits_[segment + 1] - splits_[segment];
  }
  // Whether the batch contains kEmptyKey.
  bool has_empty_key() const { return has_empty_key_; }

  // Returns the place of the first key of a segment.
  int64_t first(int64_t segment) const { return splits_[segment]; }

  // Calls `visit(position, segment, place)` for each key.
  template <typename Visit>
  void ForKeys(const ParallelFor& parallel_for, const Visit& visit) const {
    constexpr int64_t kNanosecondsPerKey = 2;
    parallel_for(num_parts_, kNanosecondsPerKey * kKeysPerPart,
                 [&](int64_t first, int64_t last) {
                   uint32_t next[BucketLayout::kMaxSegments];
                   for (int64_t part = first; part < last; ++part) {
                     std::copy_n(first_places_.data() + part * num_segments_,
                                 num_segments_, next);
                     const int64_t end =
                         std::min((part + 1) * kKeysPerPart, places_.size());
                     for (int64_t i = part * kKeysPerPart; i < end; ++i) {
                       visit(i, segments_[i], next[segments_[i]]++);
                     }
                   }
                 });
  }

 private:
  // Number of keys in a part of the batch.
  static constexpr int64_t kKeysPerPart = 4096;

  int64_t num_segments_;
  int64_t num_parts_;
  RawArray<KeyPlace> places_;
  // The segment of each key, in the order of the batch.
  RawArray<uint8_t> segments_;
  // For each part, the place of the first key of each segment,
  // [num_parts, num_segments].
  std::vector<uint32_t> first_places_;
  // [num_segments + 1].
  std::vector<int64_t> splits_;
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
