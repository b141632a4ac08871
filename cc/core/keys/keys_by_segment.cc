#include "cc/core/keys/keys_by_segment.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"

namespace layoutmap {

KeysBySegment DealKeys(const BucketLayout& layout, Span<const int64_t> keys,
                       const ParallelFor& parallel_for) {
  const int64_t num_keys = keys.size();
  std::vector<uint32_t> buckets(num_keys);
  parallel_for(num_keys, 2, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      buckets[i] = static_cast<uint32_t>(layout.BucketOf(keys[i]));
    }
  });
  KeysBySegment dealt;
  dealt.splits.assign(layout.num_segments() + 1, 0);
  for (uint32_t bucket : buckets) ++dealt.splits[layout.SegmentOf(bucket)];
  int64_t start = 0;
  for (int64_t& split : dealt.splits) start += std::exchange(split, start);
  // splits[s] is where the next key of segment s goes, and in the end where
  // segment s + 1 begins.
  dealt.places.resize(num_keys);
  for (int64_t i = 0; i < num_keys; ++i) {
    int64_t& next = dealt.splits[layout.SegmentOf(buckets[i])];
    dealt.places[next++] = {static_cast<uint32_t>(i), buckets[i]};
  }
  for (int64_t s = layout.num_segments(); s > 0; --s) {
    dealt.splits[s] = dealt.splits[s - 1];
  }
  dealt.splits[0] = 0;
  return dealt;
}

int64_t FirstOccurrences::NumSlots(int64_t num_keys) {
  int64_t num_slots = 2;
  while (num_slots < 2 * num_keys) num_slots *= 2;
  return num_slots;
}

}  // namespace layoutmap
