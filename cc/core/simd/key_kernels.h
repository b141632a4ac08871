// The loops over keys of open vocabularies, compiled once per instruction set.

#ifndef TF_LAYOUTMAP_CORE_SIMD_KEY_KERNELS_H_
#define TF_LAYOUTMAP_CORE_SIMD_KEY_KERNELS_H_

#include <cstdint>

#include "cc/core/simd/row_kernels.h"

namespace layoutmap {

// A key of a batch, where its vocabulary is looked into.
struct KeyPlace {
  int64_t key;
  uint32_t position;  // in the batch
  uint32_t bucket;    // where the search for it begins
};

// Buckets of 8 lanes that follow each other in memory; a search for a key looks
// into `num_probes` of them from one on, and goes on with the first after the
// last.
struct BucketRange {
  int64_t* keys;
  int32_t* last_step;
  int32_t* count;
  int64_t first;  // the number of the first bucket
  int64_t size;
  int64_t num_probes;
};

struct DrawArgs {
  double a;  // values are in [a, b)
  double b;
  uint64_t state;  // of splitmix64, before the first value
  int64_t size;
  float* values;
};

// The same answers from each instruction set. Rows are bucket * 8 + lane, and
// -1 stands for none.
struct KeyKernels {
  // Where searches for keys begin, among `num_buckets`. True if a key is the
  // mark of an empty lane.
  bool (*buckets)(const int64_t* keys, int64_t size, int64_t num_buckets,
                  uint32_t* buckets);
  // The rows of keys. Returns how many buckets were looked into. `num_after`
  // more places follow, whose lines are asked for ahead.
  int64_t (*find)(const BucketRange& range, const KeyPlace* places,
                  int64_t size, int64_t num_after, int64_t* rows);
  // The first lane without a key in the buckets of a search.
  int64_t (*find_free)(const BucketRange& range, int64_t bucket);
  // The lane whose last step is the lowest, if that is below `step`; of equal
  // ones the lowest row.
  int64_t (*find_least_recent)(const BucketRange& range, int64_t bucket,
                               int32_t step);
  // Uniform first values.
  void (*draw)(const DrawArgs& args);
};

// `level` must be one that this CPU has.
const KeyKernels& KeyKernelsFor(CpuLevel level);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SIMD_KEY_KERNELS_H_
