// Views of the variables that store the state of an open vocabulary.

#ifndef TF_LAYOUTMAP_CORE_KEYS_VOCABULARY_STATE_H_
#define TF_LAYOUTMAP_CORE_KEYS_VOCABULARY_STATE_H_

#include <cstdint>

#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/tables/sharded_view.h"

namespace layoutmap {

// Each view has the shape [num_buckets, 8], and all views are sharded in the
// same way. A lane without a key has the key kEmptyKey, the step 0 and the
// count 0.
struct VocabularyState {
  ShardedView<int64_t> keys;
  // Number of the last step that used the key.
  ShardedView<int32_t> last_step;
  // Number of uses of the key.
  ShardedView<int32_t> count;
  // The state of the sketches, [num_segments, 2, cells] and [num_segments]
  // (cc/core/keys/sketch.h). Empty if keys are not admitted by count.
  Span<uint8_t> sketch;
  Span<int64_t> seen;
  // The segments that this object contains, if it contains only a part of the
  // vocabulary, for example on a server. The views are indexed by the buckets
  // of the full vocabulary, and only the buckets of these segments may be
  // accessed. `sketch` and `seen` contain only these segments. If
  // `num_segments` is 0, this object contains the full vocabulary.
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

// Accesses the buckets of a state through a `locate` function
// (RowPartition::WithLocate), which is faster in loops than
// `RowPartition::Locate`.
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

// Returns the lane of a key in a bucket, or -1 if the bucket does not contain
// the key.
inline int FindLane(const int64_t* keys, int64_t key) {
  // The loop compares all lanes without branches, so that the compiler can use
  // vector instructions.
  unsigned found = 0;
  for (int lane = 0; lane < kKeysPerBucket; ++lane) {
    found |= static_cast<unsigned>(keys[lane] == key) << lane;
  }
  return found == 0 ? -1 : __builtin_ctz(found);
}

// Returns the row of a key, or kNoRow if the key is not found. The search
// starts in `bucket`. The function adds the number of visited buckets to
// `num_probes`. `keys_of(bucket)` must return the keys of a bucket.
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
