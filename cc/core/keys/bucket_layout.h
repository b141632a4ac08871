// Determines the location of keys in an open vocabulary.
//
// A hash of the key selects bucket b, which is in segment
// b / buckets_per_segment. The search for the key visits up to four buckets: b,
// b + 1, b + 2 and b + 3. After the last bucket of the segment, it continues
// with the first bucket of the segment. The row of the key is
// bucket * 8 + lane.
//
// The location of a key determines its row, so there is no separate map from
// keys to rows. A bucket is one cache line. Each segment is processed by one
// worker, so that no two workers access the same bucket.

#ifndef TF_LAYOUTMAP_CORE_KEYS_BUCKET_LAYOUT_H_
#define TF_LAYOUTMAP_CORE_KEYS_BUCKET_LAYOUT_H_

#include <cstdint>

#include "cc/core/base/status.h"
#include "cc/core/rows/row_partition.h"

namespace layoutmap {

constexpr int64_t kKeysPerBucket = 8;
// The value of a lane without a key, which is not a valid key.
constexpr int64_t kEmptyKey = INT64_MIN;
// The row of a key that is not in the vocabulary.
constexpr int64_t kNoRow = -1;

// Maps 64-bit values one-to-one to 64-bit values. Every output bit depends on
// every input bit. This function is the finalizer of splitmix64 and must not
// change, because exported graphs compute the same function.
inline uint64_t MixBits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Maps the 32-bit value `bits` proportionally to [0, size). `size` must be at
// most 2^32.
inline uint64_t ScaledTo(uint64_t size, uint32_t bits) {
  return (bits * size) >> 32;
}

class BucketLayout {
 public:
  static constexpr int64_t kMaxSegments = 64;
  static constexpr int64_t kMaxProbes = 4;
  static constexpr int64_t kMaxBuckets = int64_t{1} << 29;  // 2^32 rows.

  // Creates a layout of one bucket.
  BucketLayout() : BucketLayout(1) {}

  // Computes the number of buckets that a vocabulary needs for at least
  // `capacity` rows. Returns an error unless the capacity is in [1, 2^32].
  static Status NumBucketsFor(int64_t capacity, int64_t* num_buckets);

  // Returns an error if `NumBucketsFor` cannot return `num_buckets`.
  static Status Make(int64_t num_buckets, BucketLayout* layout);

  int64_t num_buckets() const { return num_buckets_; }
  int64_t num_rows() const { return num_buckets_ * kKeysPerBucket; }
  int64_t num_segments() const { return num_segments_; }
  int64_t buckets_per_segment() const { return buckets_per_segment_; }
  // Returns the number of buckets that a search visits.
  int64_t num_probes() const { return num_probes_; }

  int64_t BucketOf(int64_t key) const {
    const uint64_t bits = MixBits(static_cast<uint64_t>(key));
    return static_cast<int64_t>(
        ScaledTo(num_buckets_, static_cast<uint32_t>(bits >> 32)));
  }
  int64_t SegmentOf(int64_t bucket) const {
    return static_cast<int64_t>(by_segment_(bucket));
  }
  // Returns the next bucket that a search visits after `bucket`.
  int64_t Next(int64_t bucket) const {
    const int64_t end = (SegmentOf(bucket) + 1) * buckets_per_segment_;
    return bucket + 1 < end ? bucket + 1 : end - buckets_per_segment_;
  }

 private:
  explicit BucketLayout(int64_t num_buckets);

  int64_t num_buckets_;
  int64_t num_segments_;
  int64_t buckets_per_segment_;
  int64_t num_probes_;
  Divider by_segment_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_KEYS_BUCKET_LAYOUT_H_
