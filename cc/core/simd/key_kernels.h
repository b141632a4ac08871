// Kernels over the keys of open vocabularies, compiled once per instruction
// set.

#ifndef TF_LAYOUTMAP_CORE_SIMD_KEY_KERNELS_H_
#define TF_LAYOUTMAP_CORE_SIMD_KEY_KERNELS_H_

#include <cstdint>

#include "cc/core/simd/row_kernels.h"

namespace layoutmap {

// A key of a batch and the bucket in which its search starts.
struct KeyPlace {
  int64_t key;
  uint32_t position;  // position in the batch
  uint32_t bucket;    // first bucket of the search
};

// Contiguous buckets of 8 lanes each. The search for a key visits `num_probes`
// consecutive buckets and continues with the first bucket after the last one.
struct BucketRange {
  int64_t* keys;
  int32_t* last_step;
  int32_t* count;
  int64_t first;  // index of the first bucket
  int64_t size;
  int64_t num_probes;
};

struct DrawArgs {
  double a;  // values are in [a, b)
  double b;
  uint64_t state;  // state of splitmix64 before the first value
  int64_t size;
  float* values;
};

// The kernels for one instruction set. All instruction sets return equal
// results. A row is bucket * 8 + lane; -1 means that there is no row.
struct KeyKernels {
  // Computes the bucket, among `num_buckets`, in which the search for each key
  // starts. Returns true if one of the keys is the value that marks empty
  // lanes.
  bool (*buckets)(const int64_t* keys, int64_t size, int64_t num_buckets,
                  uint32_t* buckets);
  // Finds the rows of keys. Returns the number of visited buckets. `places`
  // holds `num_after` more elements, whose cache lines are prefetched.
  int64_t (*find)(const BucketRange& range, const KeyPlace* places,
                  int64_t size, int64_t num_after, int64_t* rows);
  // Returns the first empty lane in the buckets of a search.
  int64_t (*find_free)(const BucketRange& range, int64_t bucket);
  // Returns the lane with the lowest last step, if that step is below `step`.
  // Among equal steps, returns the lowest row.
  int64_t (*find_least_recent)(const BucketRange& range, int64_t bucket,
                               int32_t step);
  // Draws uniformly distributed initial values.
  void (*draw)(const DrawArgs& args);
};

// Returns the kernels for `level`, which this CPU must support.
const KeyKernels& KeyKernelsFor(CpuLevel level);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SIMD_KEY_KERNELS_H_
