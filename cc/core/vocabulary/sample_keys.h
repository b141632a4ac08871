// Reads the counts of keys, and samples keys that have a row.

#ifndef TF_LAYOUTMAP_CORE_VOCABULARY_SAMPLE_KEYS_H_
#define TF_LAYOUTMAP_CORE_VOCABULARY_SAMPLE_KEYS_H_

#include <cstdint>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/policy.h"
#include "cc/core/tables/sharded_view.h"

namespace layoutmap {

// The keys of a vocabulary and their counts, for reading. The views have the
// shape [num_buckets, 8], and their shards are contiguous ranges of buckets.
struct CountedKeys {
  ShardedView<const int64_t> keys;
  ShardedView<const int32_t> last_step;
  ShardedView<const int32_t> count;
  // The bucket of the vocabulary at which the views begin. If the views contain
  // only a part of the vocabulary, for example the buckets of a server, this
  // part consists of complete segments.
  int64_t first_bucket = 0;
  // Number of the last training step, at which counts are decayed.
  int32_t step = 0;
  // Defines the decay of counts. The other settings are not used.
  VocabularyPolicy policy;
};

// Sets counts[i] to the decayed count of keys[i], or to 0 if the key has no row
// in `counted`. `layout` is the layout of the full vocabulary.
void CountKeys(const BucketLayout& layout, const CountedKeys& counted,
               Span<const int64_t> keys, const ParallelFor& parallel_for,
               Span<int64_t> counts);

// The weights with which keys are sampled.
enum class SampleBy {
  // Each key that has a row has the weight 1.
  kUniform,
  // The weight of a key is its decayed count, but at least 1.
  kCount,
};

// Samples with replacement: sets keys[i], rows[i] and weights[i] to a key, its
// row in the vocabulary, and its weight. Each key is drawn with the probability
// weight / total. The function returns `total`, the sum of the weights of all
// keys. If the result is 0, no key has a row, and nothing is written.
//
// The result depends only on the values in `counted` and on the two values of
// `seed`. It does not depend on the sharding or the number of threads. The
// three spans must have the same size.
int64_t SampleKeys(const CountedKeys& counted, SampleBy by,
                   const uint64_t (&seed)[2], const ParallelFor& parallel_for,
                   Span<int64_t> keys, Span<int64_t> rows,
                   Span<int64_t> weights);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_VOCABULARY_SAMPLE_KEYS_H_
