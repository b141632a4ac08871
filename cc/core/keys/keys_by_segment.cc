#include "cc/core/keys/keys_by_segment.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/memory/raw_array.h"
#include "cc/core/simd/key_kernels.h"

namespace layoutmap {

void SegmentPlaces::SumCounts() {
  splits_.reserve(num_segments_ + 1);
  uint32_t place = 0;
  for (int64_t s = 0; s < num_segments_; ++s) {
    splits_.push_back(place);
    for (int64_t part = 0; part < num_parts_; ++part) {
      uint32_t& count = first_places_[part * num_segments_ + s];
      place += std::exchange(count, place);
    }
  }
  splits_.push_back(place);
}

KeysBySegment::KeysBySegment(const BucketLayout& layout,
                             Span<const int64_t> keys,
                             const KeyKernels& kernels,
                             const ParallelFor& parallel_for)
    : keys_(keys.size()),
      segments_(keys.size()),
      places_(layout.num_segments(), keys.size()) {
  const RawArray<uint32_t> buckets(keys.size());
  std::vector<char> has_empty_key(places_.num_parts());
  places_.Assign(
      parallel_for, 2,
      [&](int64_t part, int64_t begin, int64_t end, uint32_t* counts) {
        has_empty_key[part] =
            kernels.buckets({keys.data() + begin, end - begin,
                             layout.num_buckets(), layout.num_segments(),
                             buckets.data() + begin, segments_.data() + begin});
        for (int64_t i = begin; i < end; ++i) ++counts[segments_[i]];
      });
  has_empty_key_ = std::count(has_empty_key.begin(), has_empty_key.end(), 0) !=
                   places_.num_parts();
  KeyPlace* const sorted = keys_.data();
  places_.ForKeys(
      parallel_for, 3, segments_.data(),
      [&](int64_t i, uint8_t, uint32_t place) {
        __builtin_prefetch(sorted + place + SegmentPlaces::kPlacesAhead,
                           /*write=*/1, /*locality=*/2);
        sorted[place] = {keys[i], static_cast<uint32_t>(i), buckets[i]};
      });
}

int64_t FirstOccurrences::NumSlots(int64_t num_keys) {
  int64_t num_slots = 2;
  while (num_slots < 2 * num_keys) num_slots *= 2;
  return num_slots;
}

}  // namespace layoutmap
