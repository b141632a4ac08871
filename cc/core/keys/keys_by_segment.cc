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
namespace {

// Number of keys in a part of the batch. The number must not depend on the
// number of threads, because the boundaries of the parts affect the order of
// the keys.
constexpr int64_t kKeysPerPart = 4096;

}  // namespace

KeysBySegment DealKeys(const BucketLayout& layout, Span<const int64_t> keys,
                       const KeyKernels& kernels,
                       const ParallelFor& parallel_for) {
  const int64_t num_keys = keys.size();
  const int64_t num_segments = layout.num_segments();
  const int64_t num_parts = (num_keys + kKeysPerPart - 1) / kKeysPerPart;
  const RawArray<uint32_t> buckets(num_keys);
  // Indexed by part, then by segment. At first, each value is the number of
  // keys. Later, it is the place of the next key.
  std::vector<int64_t> next(num_parts * num_segments);
  std::vector<char> has_empty_key(num_parts);
  const auto for_parts = [&](int64_t nanoseconds_per_key, const auto& work) {
    parallel_for(num_parts, nanoseconds_per_key * kKeysPerPart,
                 [&](int64_t first, int64_t last) {
                   for (int64_t part = first; part < last; ++part) {
                     const int64_t begin = part * kKeysPerPart;
                     work(part, begin, std::min(begin + kKeysPerPart, num_keys),
                          next.data() + part * num_segments);
                   }
                 });
  };
  for_parts(2, [&](int64_t part, int64_t begin, int64_t end, int64_t* counts) {
    has_empty_key[part] =
        kernels.buckets(keys.data() + begin, end - begin, layout.num_buckets(),
                        buckets.data() + begin);
    for (int64_t i = begin; i < end; ++i) {
      ++counts[layout.SegmentOf(buckets[i])];
    }
  });

  KeysBySegment grouped;
  grouped.has_empty_key =
      std::count(has_empty_key.begin(), has_empty_key.end(), 0) != num_parts;
  grouped.splits.reserve(num_segments + 1);
  int64_t start = 0;
  for (int64_t s = 0; s < num_segments; ++s) {
    grouped.splits.push_back(start);
    for (int64_t part = 0; part < num_parts; ++part) {
      int64_t& count = next[part * num_segments + s];
      start += std::exchange(count, start);
    }
  }
  grouped.splits.push_back(start);

  grouped.places = RawArray<KeyPlace>(num_keys);
  grouped.place_of = RawArray<uint32_t>(num_keys);
  for_parts(3, [&](int64_t, int64_t begin, int64_t end, int64_t* next_of) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t place = next_of[layout.SegmentOf(buckets[i])]++;
      grouped.places[place] = {keys[i], static_cast<uint32_t>(i), buckets[i]};
      grouped.place_of[i] = static_cast<uint32_t>(place);
    }
  });
  return grouped;
}

int64_t FirstOccurrences::NumSlots(int64_t num_keys) {
  int64_t num_slots = 2;
  while (num_slots < 2 * num_keys) num_slots *= 2;
  return num_slots;
}

}  // namespace layoutmap
