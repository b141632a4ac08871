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

// The relative row of a key that is not in the vocabulary.
constexpr uint32_t kNoRelativeRow = UINT32_MAX;

// The relative row of a key that is not in the vocabulary, if one of the
// buckets that the search visited has an empty lane. Only `KeyKernels::search`
// returns this value.
constexpr uint32_t kNoRowButSpace = UINT32_MAX - 1;

// A key for which a search found no row.
struct MissedKey {
  // Index of the key among the keys of the search.
  uint32_t index;
  // Whether one of the visited buckets may have an empty lane. 0 or 1.
  uint32_t may_have_space;
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

struct BucketArgs {
  const int64_t* keys;
  int64_t size;
  int64_t num_buckets;
  // Number of segments, which divides `num_buckets`.
  int64_t num_segments;
  // For each key, the bucket in which the search starts, and its segment.
  uint32_t* buckets;
  uint8_t* segments;
};

// A search for the keys of a part of a batch, in the order of the batch. The
// search for a key visits `num_probes` consecutive buckets. After the last
// bucket of the segment, it continues with the first bucket of the segment.
struct SearchArgs {
  const int64_t* keys;
  int64_t size;
  int64_t num_segments;
  int64_t buckets_per_segment;
  int64_t num_probes;
  // The lanes of each segment.
  const int64_t* const* lanes;
  // The segment of each key.
  uint8_t* segments;
  // The row of each key relative to the first row of its segment. If the key
  // has no row, this value is kNoRelativeRow or kNoRowButSpace.
  uint32_t* rows;
  // For each segment, the kernel adds the number of its keys.
  uint32_t* counts;
};

struct SearchResult {
  // Whether a key equals the value of empty lanes.
  bool has_empty_key = false;
  // Number of buckets that the searches visited.
  int64_t num_probes = 0;
};

// Uses of rows in one segment. In this example, the first row of the segment is
// 20:
//
//   uses        (row 3, position 2)  (row 0, position 4)  (row 3, position 7)
//   rows        20 23
//   starts      0 1
//   positions   4 2 7
struct GroupArgs {
  // The upper 32 bits are the row, relative to the first row of the segment.
  // The lower 32 bits are the position. The kernel overwrites the uses.
  uint64_t* uses;
  int64_t size;
  uint32_t first_row;
  // A bitmap with one bit per row of the segment. The bits of the used rows are
  // set.
  const uint64_t* used;
  int64_t num_words;
  // Memory for `num_words` values and for `size` values.
  uint32_t* ranks;
  uint32_t* next;
  // The unique rows in ascending order.
  uint32_t* rows;
  // Index of the first position of each row.
  uint32_t* starts;
  // The positions of each row, in the order of `uses`.
  uint32_t* positions;
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
  // Computes the bucket and the segment of each key. Returns true if one of the
  // keys is the value that marks empty lanes.
  bool (*buckets)(const BucketArgs& args);
  // Sets rows[i] to the row of key i, relative to the first row of the range,
  // or to kNoRelativeRow. Writes the keys without a row to `missed` and returns
  // their number. `missed` must have `size` elements.
  int64_t (*find)(const BucketRange& range, const KeyPlace* places,
                  int64_t size, uint32_t* rows, MissedKey* missed,
                  int64_t* num_probes);
  // Finds the rows of keys of all segments.
  SearchResult (*search)(const SearchArgs& args);
  // Groups uses of rows by row, and returns the number of unique rows.
  int64_t (*group)(const GroupArgs& args);
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
