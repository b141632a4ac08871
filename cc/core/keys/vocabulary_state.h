// The state of an open vocabulary, in memory that somebody else owns.

#ifndef TF_LAYOUTMAP_CORE_KEYS_VOCABULARY_STATE_H_
#define TF_LAYOUTMAP_CORE_KEYS_VOCABULARY_STATE_H_

#include <cstdint>

#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/tables/sharded_view.h"

namespace layoutmap {

// Views by bucket, [num_buckets, 8] each, in shards that all are cut alike. A
// lane without a key has kEmptyKey, step 0 and count 0.
struct VocabularyState {
  ShardedView<int64_t> keys;
  ShardedView<int32_t> last_step;  // that used the key
  ShardedView<int32_t> count;      // of uses
  // [num_segments, 2, cells] and [num_segments] (cc/core/keys/sketch.h);
  // empty where keys are not admitted by their count.
  Span<uint8_t> sketch;
  Span<int64_t> seen;
  // Of a part, as a server has it: whole segments, these. The views are still
  // numbered by all buckets, and nothing may ask for any but those here; the
  // sketch is that of these segments. 0 segments: all of the vocabulary.
  int64_t first_segment = 0;
  int64_t num_segments = 0;

  int64_t NumSegments(const BucketLayout& layout) const {
    return num_segments > 0 ? num_segments : layout.num_segments();
  }
  bool HasSegment(const BucketLayout& layout, int64_t segment) const {
    return segment >= first_segment &&
           segment < first_segment + NumSegments(layout);
  }
};

// The buckets of a state, found by one `locate` of their partition
// (RowPartition::WithLocate), for loops.
template <typename Locate>
struct Buckets {
  struct Bucket {
    int64_t* keys;
    int32_t* last_step;
    int32_t* count;
  };

  Bucket at(int64_t bucket) const {
    const RowOwner owner = locate(bucket);
    const int64_t first = owner.local_row * kKeysPerBucket;
    return {state->keys.shards[owner.shard] + first,
            state->last_step.shards[owner.shard] + first,
            state->count.shards[owner.shard] + first};
  }
  int64_t* keys(int64_t bucket) const {
    const RowOwner owner = locate(bucket);
    return state->keys.shards[owner.shard] + owner.local_row * kKeysPerBucket;
  }

  Locate locate;
  const VocabularyState* state;
};

// Calls `work(buckets)`.
template <typename Work>
void WithBuckets(const VocabularyState& state, const Work& work) {
  state.keys.partition->WithLocate(
      [&](auto locate) { work(Buckets<decltype(locate)>{locate, &state}); });
}

// The lane of a key in its bucket, or -1.
inline int FindLane(const int64_t* keys, int64_t key) {
  // All are compared, without a branch: a vector instruction where there is
  // one.
  unsigned found = 0;
  for (int lane = 0; lane < kKeysPerBucket; ++lane) {
    found |= static_cast<unsigned>(keys[lane] == key) << lane;
  }
  return found == 0 ? -1 : __builtin_ctz(found);
}

// The row of a key whose search begins in `bucket`, or kNoRow. `num_probes`
// goes up by the buckets looked into. `keys_of(bucket)` are its keys.
template <typename KeysOf>
int64_t FindRow(const BucketLayout& layout, const KeysOf& keys_of,
                int64_t bucket, int64_t key, int64_t* num_probes) {
  for (int64_t p = 0; p < layout.num_probes(); ++p) {
    ++*num_probes;
    const int lane = FindLane(keys_of(bucket), key);
    if (lane >= 0) return bucket * kKeysPerBucket + lane;
    bucket = layout.Next(bucket);
  }
  return kNoRow;
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_KEYS_VOCABULARY_STATE_H_
