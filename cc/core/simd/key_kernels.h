// Kernels that process the keys of open vocabularies. They are compiled once
// per instruction set.

#ifndef TF_LAYOUTMAP_CORE_SIMD_KEY_KERNELS_H_
#define TF_LAYOUTMAP_CORE_SIMD_KEY_KERNELS_H_

#include <cstdint>

#include "cc/core/simd/row_kernels.h"

namespace layoutmap {

// A key of a batch, with the bucket in which the search for the key starts.
struct KeyPlace {
  int64_t key;
  // Position of the key in the batch.
  uint32_t position;
  // The first bucket of the search.
  uint32_t bucket;
};

// Contiguous buckets, which have 8 lanes each. The search for a key visits
// `num_probes` consecutive buckets. After the last bucket, it continues with
// the first bucket.
struct BucketRange {
  int64_t* keys;
  int32_t* last_step;
  int32_t* count;
  // Index of the first bucket.
  int64_t first;
  int64_t size;
  int64_t num_probes;
};

struct DrawArgs {
  // The values are in [a, b).
  double a;
  double b;
  // State of the splitmix64 generator before the first value.
  uint64_t state;
  int64_t size;
  float* values;
};

// The kernels for one instruction set. The results are equal for all
// instruction sets. The number of a row is bucket * 8 + lane. The result -1
// means that no row was found.
struct KeyKernels {
  // For each key, computes the bucket in which the search starts. Returns true
  // if one of the keys is the value that marks empty lanes.
  bool (*buckets)(const int64_t* keys, int64_t size, int64_t num_buckets,
                  uint32_t* buckets);
  // Finds the rows of keys. Returns the number of visited buckets. `places` has
  // `num_after` more elements after the first `size` elements. The kernel
  // prefetches the cache lines of these elements.
  int64_t (*find)(const BucketRange& range, const KeyPlace* places,
                  int64_t size, int64_t num_after, int64_t* rows);
  // Returns the row of the first empty lane that a search visits.
  int64_t (*find_free)(const BucketRange& range, int64_t bucket);
  // Returns the row with the lowest last step if that step is below `step`. If
  // several rows have this step, returns the lowest row.
  int64_t (*find_least_recent)(const BucketRange& range, int64_t bucket,
                               int32_t step);
  // Draws uniformly distributed initial values.
  void (*draw)(const DrawArgs& args);
};

// Returns the kernels for `level`, which this CPU must support.
const KeyKernels& KeyKernelsFor(CpuLevel level);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SIMD_KEY_KERNELS_H_
