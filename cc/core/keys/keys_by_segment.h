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

// The keys of a batch, grouped by segment. The keys of a segment are
// contiguous, so that the workers of different segments access different
// memory.
struct KeysBySegment {
  // The keys of segment s are places[splits[s]] to places[splits[s + 1] - 1].
  // Their positions in the batch are ascending.
  RawArray<KeyPlace> places;
  std::vector<int64_t> splits;
  // For each key of the batch, its index in `places`.
  RawArray<uint32_t> place_of;
  // Whether the batch contains kEmptyKey.
  bool has_empty_key = false;
};

KeysBySegment DealKeys(const BucketLayout& layout, Span<const int64_t> keys,
                       const KeyKernels& kernels,
                       const ParallelFor& parallel_for);

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
