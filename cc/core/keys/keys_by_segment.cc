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
KeysBySegment::KeysBySegment(const BucketLayout& layout,
                             Span<const int64_t> keys,
                             const KeyKernels& kernels,
                             const ParallelFor& parallel_for)
    : num_segments_(layout.num_segments()),
      num_parts_((keys.size() + kKeysPerPart - 1) / kKeysPerPart),
      places_(keys.size()),
      segments_(keys.size()),
      first_places_(num_parts_ * num_segments_) {
  const int64_t num_keys = keys.size();
  const RawArray<uint32_t> buckets(num_keys);
  std::vector<char> has_empty_key(num_parts_);
  // At first, the values in `first_places_` are numbers of keys.
  const auto for_parts = [&](int64_t nanoseconds_per_key, const auto& work) {
    parallel_for(num_parts_, nanoseconds_per_key * kKeysPerPart,
                 [&](int64_t first, int64_t last) {
                   for (int64_t part = first; part < last; ++part) {
                     const int64_t begin = part * kKeysPerPart;
                     work(part, begin, std::min(begin + kKeysPerPart, num_keys),
                          first_places_.data() + part * num_segments_);
                   }
                 });
  };
  for_parts(2, [&](int64_t part, int64_t begin, int64_t end, uint32_t* counts) {
    has_empty_key[part] = kernels.buckets(
        {keys.data() + begin, end - begin, layout.num_buckets(), num_segments_,
         buckets.data() + begin, segments_.data() + begin});
    for (int64_t i = begin; i < end; ++i) ++counts[segments_[i]];
  });
  has_empty_key_ =
      std::count(has_empty_key.begin(), has_empty_key.end(), 0) != num_parts_;
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
  for_parts(3, [&](int64_t, int64_t begin, int64_t end, const uint32_t* first) {
    uint32_t next[BucketLayout::kMaxSegments];
    std::copy_n(first, num_segments_, next);
    KeyPlace* const places = places_.data();
    for (int64_t i = begin; i < end; ++i) {
      places[next[segments_[i]]++] = {keys[i], static_cast<uint32_t>(i),
                                      buckets[i]};
    }
  });
}

int64_t FirstOccurrences::NumSlots(int64_t num_keys) {
  int64_t num_slots = 2;
  while (num_slots < 2 * num_keys) num_slots *= 2;
  return num_slots;
}

}  // namespace layoutmap
