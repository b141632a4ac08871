// The keys of a batch, grouped by segments of a vocabulary.

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

// The keys of a batch in places that are contiguous for each segment. The
// worker of a segment therefore accesses separate memory.
struct KeysBySegment {
  // The keys of segment s are places[splits[s]] to places[splits[s + 1] - 1],
  // with ascending positions.
  RawArray<KeyPlace> places;
  std::vector<int64_t> splits;
  // Index in `places` of each key of the batch.
  RawArray<uint32_t> place_of;
  bool has_empty_key = false;  // whether kEmptyKey is among the keys
};

KeysBySegment DealKeys(const BucketLayout& layout, Span<const int64_t> keys,
                       const KeyKernels& kernels,
                       const ParallelFor& parallel_for);

// Finds duplicate keys: returns the first occurrence of each key of a list.
class FirstOccurrences {
 public:
  // Returns the number of slots for a list of `num_keys` keys.
  static int64_t NumSlots(int64_t num_keys);

  // `slots` must have NumSlots(num_keys) elements and may be uninitialized.
  explicit FirstOccurrences(Span<uint32_t> slots) : slots_(slots) {
    std::fill(slots.begin(), slots.end(), 0);
  }

  // Returns the number under which an equal key was added first, or `number` if
  // there is none. `key_of(n)` must return the key that was added with number
  // n.
  template <typename KeyOf>
  uint32_t Add(int64_t key, uint32_t number, const KeyOf& key_of) {
    const uint64_t mask = static_cast<uint64_t>(slots_.size()) - 1;
    // Does not use the bits that select the segment and the bucket.
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
