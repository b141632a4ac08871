#include "cc/core/keys/find_keys.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/keys_by_segment.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/core/memory/raw_array.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/simd/key_kernels.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/tables/sharded_view.h"

namespace layoutmap {
namespace {

// Prefetch distance: the number of keys between the prefetch of a key's buckets
// and the search for the key.
constexpr int64_t kAhead = 16;

// Approximate time per key: the time of one cache miss, reduced by the overlap
// with the cache misses of other keys.
constexpr int64_t kNanosecondsPerKey = 10;

// The number of keys that one call of a kernel finds.
constexpr int64_t kBlock = 1024;

// For fewer keys, the preparation of the kernel takes longer than the search.
constexpr int64_t kMinKeysForKernel = 256;

// Returns the lanes of each segment. Returns an empty vector if the buckets of
// a segment are in several shards, or if `stored` lacks a segment.
std::vector<const int64_t*> LanesOfSegments(
    const BucketLayout& layout, const ShardedView<const int64_t>& stored) {
  std::vector<const int64_t*> lanes(layout.num_segments());
  const int64_t size = layout.buckets_per_segment();
  bool are_contiguous = true;
  stored.partition->WithLocate([&](auto locate) {
    for (int64_t s = 0; s < layout.num_segments(); ++s) {
      const RowOwner first = locate(s * size);
      const RowOwner last = locate((s + 1) * size - 1);
      const int64_t* const shard = stored.shards[first.shard];
      are_contiguous &= shard != nullptr && first.shard == last.shard &&
                        last.local_row - first.local_row == size - 1;
      if (are_contiguous) lanes[s] = shard + first.local_row * stored.dim;
    }
  });
  if (!are_contiguous) lanes.clear();
  return lanes;
}

void FindInSegments(const BucketLayout& layout,
                    const std::vector<const int64_t*>& lanes,
                    Span<const int64_t> keys, int64_t* rows) {
  const KeyKernels& kernels = KeyKernelsFor(CurrentCpuLevel());
  const int64_t rows_per_segment =
      layout.buckets_per_segment() * kKeysPerBucket;
  uint8_t segments[kBlock];
  uint32_t relative_rows[kBlock];
  uint32_t counts[BucketLayout::kMaxSegments] = {};
  for (int64_t first = 0; first < keys.size(); first += kBlock) {
    const int64_t size = std::min(kBlock, keys.size() - first);
    const SearchResult result =
        kernels.search({keys.data() + first, size, layout.num_segments(),
                        layout.buckets_per_segment(), layout.num_probes(),
                        lanes.data(), segments, relative_rows, counts});
    for (int64_t i = 0; i < size; ++i) {
      rows[first + i] = relative_rows[i] >= kNoRowButSpace
                            ? kNoRow
                            : segments[i] * rows_per_segment + relative_rows[i];
    }
    if (!result.has_empty_key) continue;
    for (int64_t i = 0; i < size; ++i) {
      if (keys[first + i] == kEmptyKey) rows[first + i] = kNoRow;
    }
  }
}

void FindInBuckets(const BucketLayout& layout,
                   const ShardedView<const int64_t>& stored,
                   Span<const int64_t> keys, int64_t* rows) {
  stored.WithRow([&](auto keys_of) {
    int64_t buckets[kAhead];
    int64_t num_probes = 0;
    for (int64_t first = 0; first < keys.size(); first += kAhead) {
      const int64_t size = std::min(kAhead, keys.size() - first);
      for (int64_t i = 0; i < size; ++i) {
        buckets[i] = layout.BucketOf(keys[first + i]);
        __builtin_prefetch(keys_of(buckets[i]));
      }
      for (int64_t i = 0; i < size; ++i) {
        const int64_t key = keys[first + i];
        rows[first + i] =
            key == kEmptyKey
                ? kNoRow
                : FindRow(layout, keys_of, buckets[i], key, &num_probes);
      }
    }
  });
}

// Returns whether many of the keys may have no row. The result depends on a
// sample, and only affects the speed.
bool MayMissMany(const BucketLayout& layout,
                 const std::vector<const int64_t*>& lanes,
                 Span<const int64_t> keys) {
  constexpr int64_t kSampleSize = 128;
  int64_t sample[kSampleSize], rows[kSampleSize];
  const int64_t per_sample = keys.size() / kSampleSize;
  for (int64_t i = 0; i < kSampleSize; ++i) sample[i] = keys[i * per_sample];
  FindInSegments(layout, lanes, {sample, kSampleSize}, rows);
  return std::count(rows, rows + kSampleSize, kNoRow) > kSampleSize / 8;
}

// Finds keys of which many have no row. The search for such a key visits four
// buckets. The keys are therefore grouped by segment, so that the buckets of a
// segment are read from memory once. `keys` should have at least one key for
// two buckets.
void FindBySegment(const BucketLayout& layout,
                   const std::vector<const int64_t*>& lanes,
                   Span<const int64_t> keys, const ParallelFor& parallel_for,
                   Span<int64_t> rows) {
  const KeyKernels& kernels = KeyKernelsFor(CurrentCpuLevel());
  const KeysBySegment grouped(layout, keys, kernels, parallel_for);
  const SegmentPlaces& places = grouped.places();
  const RawArray<uint32_t> relative_rows(keys.size());
  const int64_t num_segments = layout.num_segments();
  const int64_t num_buckets = layout.buckets_per_segment();
  const auto prefetch = [&](int64_t segment, int64_t begin, int64_t end) {
    if (segment == num_segments) return;
    for (int64_t b = begin; b < end; ++b) {
      __builtin_prefetch(lanes[segment] + b * kKeysPerBucket, /*write=*/0,
                         /*locality=*/2);
    }
  };
  const auto find_in_segment = [&](int64_t s) {
    // While the keys of a block are searched, a part of the next segment is
    // prefetched.
    constexpr int64_t kKeysAtOnce = 64;
    // The kernel only reads the keys of the range.
    const BucketRange range = {const_cast<int64_t*>(lanes[s]),
                               nullptr,
                               nullptr,
                               s * num_buckets,
                               num_buckets,
                               layout.num_probes()};
    const int64_t first = places.first(s), size = places.size(s);
    MissedKey missed[kKeysAtOnce];
    int64_t num_probes = 0;
    for (int64_t begin = 0; begin < size; begin += kKeysAtOnce) {
      const int64_t end = std::min(begin + kKeysAtOnce, size);
      prefetch(s + 1, num_buckets * begin / size, num_buckets * end / size);
      kernels.find(range, grouped.keys().data() + first + begin, end - begin,
                   relative_rows.data() + first + begin, missed, &num_probes);
    }
  };
  parallel_for(num_segments, 1 + 10 * keys.size() / num_segments,
               [&](int64_t begin, int64_t end) {
                 prefetch(begin, 0, num_buckets);
                 for (int64_t s = begin; s < end; ++s) find_in_segment(s);
               });
  places.ForKeys(parallel_for, 2, grouped.segments(),
                 [&](int64_t i, int64_t segment, uint32_t place) {
                   __builtin_prefetch(relative_rows.data() + place +
                                      SegmentPlaces::kPlacesAhead);
                   const uint32_t row = relative_rows[place];
                   rows[i] = row == kNoRelativeRow || keys[i] == kEmptyKey
                                 ? kNoRow
                                 : segment * num_buckets * kKeysPerBucket + row;
                 });
}

}  // namespace

void FindKeys(const BucketLayout& layout,
              const ShardedView<const int64_t>& stored,
              Span<const int64_t> keys, const ParallelFor& parallel_for,
              Span<int64_t> rows) {
  std::vector<const int64_t*> lanes;
  if (keys.size() >= kMinKeysForKernel) lanes = LanesOfSegments(layout, stored);
  // If the keys are few, the search does not visit all buckets of a segment.
  if (!lanes.empty() && 2 * keys.size() >= layout.num_buckets() &&
      MayMissMany(layout, lanes, keys)) {
    return FindBySegment(layout, lanes, keys, parallel_for, rows);
  }
  parallel_for(
      keys.size(), kNanosecondsPerKey, [&](int64_t begin, int64_t end) {
        const Span<const int64_t> part = {keys.data() + begin, end - begin};
        if (lanes.empty()) {
          FindInBuckets(layout, stored, part, rows.data() + begin);
        } else {
          FindInSegments(layout, lanes, part, rows.data() + begin);
        }
      });
}

}  // namespace layoutmap
