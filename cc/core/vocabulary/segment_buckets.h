// Classes through which a worker accesses the buckets of one segment.

#ifndef TF_LAYOUTMAP_CORE_VOCABULARY_SEGMENT_BUCKETS_H_
#define TF_LAYOUTMAP_CORE_VOCABULARY_SEGMENT_BUCKETS_H_

#include <algorithm>
#include <cstdint>

#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/core/simd/key_kernels.h"

namespace layoutmap {

// Pointers to the values of one lane of a vocabulary.
struct Lane {
  int64_t* key;
  int32_t* last_step;
  int32_t* count;
};

// A segment that is contiguous in one shard, so that kernels can process it.
class SingleShardSegment {
 public:
  // `next_keys` points to the keys of the next segment, or is null if there is
  // no next segment.
  SingleShardSegment(const BucketRange& range, const int64_t* next_keys,
                     const KeyKernels& kernels)
      : range_(range),
        next_keys_(range.size > kMaxAhead ? nullptr : next_keys),
        kernels_(kernels) {}

  // Prefetches the first buckets of keys.
  void PrefetchKeys(const KeyPlace* places, int64_t size) const {
    for (int64_t i = 0; i < size; ++i) {
      // The code prefetches into the second-level cache, because prefetches
      // into the first-level cache would stall.
      __builtin_prefetch(
          range_.keys + (places[i].bucket - range_.first) * kKeysPerBucket,
          /*write=*/0, /*locality=*/2);
    }
  }
  // Finds the rows of keys (KeyKernels::find).
  int64_t Find(const KeyPlace* places, int64_t size, uint32_t* rows,
               MissedKey* missed, int64_t* num_probes) const {
    return kernels_.find(range_, places, size, rows, missed, num_probes);
  }
  // Searches for a row without a key, starting in `bucket`. Returns the first
  // such row, or kNoRow.
  int64_t FindFree(int64_t bucket) const {
    return kernels_.find_free(range_, bucket);
  }
  // Returns the row with the lowest last step if that step is below `step`, or
  // kNoRow otherwise. If several rows have this step, returns the lowest row,
  // even if the search visits it later because it wraps around.
  int64_t FindLeastRecent(int64_t bucket, int32_t step) const {
    return kernels_.find_least_recent(range_, bucket, step);
  }
  // Prefetches a fraction of the next segment's keys, from begin / total to end
  // / total. If a batch visits most cache lines of a segment, sequential
  // prefetches are faster than one prefetch per key.
  void PrefetchNext(int64_t begin, int64_t end, int64_t total) const {
    if (next_keys_ == nullptr || 2 * total < range_.size) return;
    const int64_t last = range_.size * end / total;
    for (int64_t b = range_.size * begin / total; b < last; ++b) {
      __builtin_prefetch(next_keys_ + b * kKeysPerBucket, /*write=*/0,
                         /*locality=*/2);
    }
  }
  // Prefetches the data that FindLeastRecent reads, and the counts of these
  // rows for writing. A store to a count that is not in a cache would delay the
  // stores after it.
  void Prefetch(int64_t bucket) const {
    const int64_t end = range_.first + range_.size;
    const int64_t last = std::min(bucket + range_.num_probes, end) - 1;
    // The steps of two buckets fill a cache line, so three prefetches are
    // enough.
    for (int64_t one : {bucket, std::min(bucket + 2, last), last}) {
      const int64_t lane = (one - range_.first) * kKeysPerBucket;
      __builtin_prefetch(range_.last_step + lane);
      __builtin_prefetch(range_.count + lane, /*write=*/1, /*locality=*/2);
    }
  }
  // Prefetches the last step and the count of a row for writing. `row` may be a
  // row after the segment.
  void PrefetchToWrite(int64_t row) const {
    const int64_t lane = row - range_.first * kKeysPerBucket;
    __builtin_prefetch(range_.last_step + lane, /*write=*/1, /*locality=*/2);
    __builtin_prefetch(range_.count + lane, /*write=*/1, /*locality=*/2);
  }
  Lane At(int64_t row) const {
    const int64_t lane = row - range_.first * kKeysPerBucket;
    return {range_.keys + lane, range_.last_step + lane, range_.count + lane};
  }

 private:
  // Maximum size in cache lines of a segment that is prefetched in advance. The
  // limit is half of a second-level cache, because the current segment needs
  // the other half.
  static constexpr int64_t kMaxAhead = 8192;

  const BucketRange range_;
  const int64_t* const next_keys_;
  const KeyKernels& kernels_;
};

// A segment that is distributed over several shards.
template <typename Locate>
class MultiShardSegment {
 public:
  MultiShardSegment(const BucketLayout& layout, const Buckets<Locate>& buckets,
                    int64_t segment)
      : layout_(layout),
        buckets_(buckets),
        first_row_(segment * layout.buckets_per_segment() * kKeysPerBucket) {}

  int64_t Find(const KeyPlace* places, int64_t size, uint32_t* rows,
               MissedKey* missed, int64_t* num_probes) const {
    const auto keys_of = [&](int64_t b) { return buckets_.keys(b); };
    int64_t num_missed = 0;
    for (int64_t i = 0; i < size; ++i) {
      const int64_t row = FindRow(layout_, keys_of, places[i].bucket,
                                  places[i].key, num_probes);
      if (row == kNoRow) {
        rows[i] = kNoRelativeRow;
        missed[num_missed++] = {static_cast<uint32_t>(i), 1};
      } else {
        rows[i] = static_cast<uint32_t>(row - first_row_);
      }
    }
    return num_missed;
  }

  int64_t FindFree(int64_t bucket) const {
    for (int64_t p = 0; p < layout_.num_probes(); ++p) {
      const int lane = FindLane(buckets_.keys(bucket), kEmptyKey);
      if (lane >= 0) return bucket * kKeysPerBucket + lane;
      bucket = layout_.Next(bucket);
    }
    return kNoRow;
  }

  int64_t FindLeastRecent(int64_t bucket, int32_t step) const {
    int64_t found = kNoRow;
    for (int64_t p = 0; p < layout_.num_probes(); ++p) {
      const int32_t* last_step = buckets_.at(bucket).last_step;
      const int32_t* lowest =
          std::min_element(last_step, last_step + kKeysPerBucket);
      const int64_t row = bucket * kKeysPerBucket + (lowest - last_step);
      if (*lowest < step ||
          (*lowest == step && found != kNoRow && row < found)) {
        found = row;
        step = *lowest;
      }
      bucket = layout_.Next(bucket);
    }
    return found;
  }

  void PrefetchKeys(const KeyPlace* /*places*/, int64_t /*size*/) const {}
  void Prefetch(int64_t /*bucket*/) const {}
  void PrefetchToWrite(int64_t /*row*/) const {}
  void PrefetchNext(int64_t /*begin*/, int64_t /*end*/,
                    int64_t /*total*/) const {}

  Lane At(int64_t row) const {
    const auto bucket = buckets_.at(row / kKeysPerBucket);
    const int64_t lane = row % kKeysPerBucket;
    return {bucket.keys + lane, bucket.last_step + lane, bucket.count + lane};
  }

 private:
  const BucketLayout& layout_;
  const Buckets<Locate>& buckets_;
  const int64_t first_row_;
};

// Returns the keys of a segment if they are contiguous in one shard. Otherwise,
// returns null.
template <typename Locate>
int64_t* KeysInOneShard(const BucketLayout& layout,
                        const Buckets<Locate>& buckets, int64_t segment) {
  const int64_t size = layout.buckets_per_segment();
  const int64_t first = segment * size, last = first + size - 1;
  int64_t* const keys = buckets.keys(first);
  if (buckets.keys(last) - keys != (size - 1) * kKeysPerBucket ||
      buckets.locate(first).shard != buckets.locate(last).shard) {
    return nullptr;
  }
  return keys;
}

// Calls `work(segment)` with an object of the class that is suitable for the
// segment.
template <typename Locate, typename Work>
void WithSegment(const BucketLayout& layout, const Buckets<Locate>& buckets,
                 const KeyKernels& kernels, int64_t segment, const Work& work) {
  if (KeysInOneShard(layout, buckets, segment) == nullptr) {
    return work(MultiShardSegment<Locate>(layout, buckets, segment));
  }
  const int64_t size = layout.buckets_per_segment();
  const auto begin = buckets.at(segment * size);
  const BucketRange range = {begin.keys,  begin.last_step,
                             begin.count, segment * size,
                             size,        layout.num_probes()};
  const int64_t* const next_keys =
      segment + 1 < layout.num_segments() &&
              buckets.state->HasSegment(layout, segment + 1)
          ? KeysInOneShard(layout, buckets, segment + 1)
          : nullptr;
  work(SingleShardSegment(range, next_keys, kernels));
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_VOCABULARY_SEGMENT_BUCKETS_H_
