// The keys of a batch, dealt to the segments of a vocabulary.

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

// Each place has its key, and each key its place: a worker of a segment reads
// and writes memory of its own, and none between that of two other segments.
struct KeysBySegment {
  // Those of segment s at [splits[s], splits[s + 1]), positions ascending.
  RawArray<KeyPlace> places;
  std::vector<int64_t> splits;
  // Where each key of the batch is among `places`.
  RawArray<uint32_t> place_of;
  bool has_empty_key = false;  // whether kEmptyKey is among the keys
};

KeysBySegment DealKeys(const BucketLayout& layout, Span<const int64_t> keys,
                       const KeyKernels& kernels,
                       const ParallelFor& parallel_for);

// Finds equal keys again: for each key of a list the first equal one.
class FirstOccurrences {
 public:
  // Slots that a list of so many keys needs.
  static int64_t NumSlots(int64_t num_keys);

  // `slots` are NumSlots(num_keys), of any values.
  explicit FirstOccurrences(Span<uint32_t> slots) : slots_(slots) {
    std::fill(slots.begin(), slots.end(), 0);
  }

  // The number under which an equal key was added first; else `number`.
  // `key_of(n)` is the key that was added as n.
  template <typename KeyOf>
  uint32_t Add(int64_t key, uint32_t number, const KeyOf& key_of) {
    const uint64_t mask = static_cast<uint64_t>(slots_.size()) - 1;
    // Other bits than those that chose the segment and the bucket.
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
