#include "cc/core/keys/bucket_layout.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "cc/core/base/status.h"
#include "cc/core/rows/row_partition.h"

namespace layoutmap {
namespace {

// Returns the largest number of segments for which each segment has enough
// buckets for one search.
int64_t NumSegments(int64_t num_buckets) {
  int64_t num_segments = 1;
  while (num_segments < BucketLayout::kMaxSegments &&
         2 * num_segments * BucketLayout::kMaxProbes <= num_buckets) {
    num_segments *= 2;
  }
  return num_segments;
}

}  // namespace

BucketLayout::BucketLayout(int64_t num_buckets)
    : num_buckets_(num_buckets),
      num_segments_(NumSegments(num_buckets)),
      buckets_per_segment_(num_buckets / num_segments_),
      num_probes_(std::min(kMaxProbes, buckets_per_segment_)),
      by_segment_(buckets_per_segment_) {}

Status BucketLayout::NumBucketsFor(int64_t capacity, int64_t* num_buckets) {
  if (capacity < 1 || capacity > kMaxBuckets * kKeysPerBucket) {
    return InvalidArgument(
        "The capacity of a vocabulary must be in [1, 2^32]. Received: " +
        std::to_string(capacity));
  }
  const int64_t needed = (capacity + kKeysPerBucket - 1) / kKeysPerBucket;
  const int64_t num_segments = NumSegments(needed);
  *num_buckets = (needed + num_segments - 1) / num_segments * num_segments;
  return Status();
}

Status BucketLayout::Make(int64_t num_buckets, BucketLayout* layout) {
  if (num_buckets < 1 || num_buckets > kMaxBuckets ||
      num_buckets % NumSegments(num_buckets) != 0) {
    return InvalidArgument(
        "The buckets of a vocabulary must be in [1, 2^29] and a multiple of "
        "its segments. Received: " +
        std::to_string(num_buckets));
  }
  *layout = BucketLayout(num_buckets);
  return Status();
}

}  // namespace layoutmap
