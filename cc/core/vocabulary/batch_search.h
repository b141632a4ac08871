// Searches for the keys of a batch in the order of the batch.

#ifndef TF_LAYOUTMAP_CORE_VOCABULARY_BATCH_SEARCH_H_
#define TF_LAYOUTMAP_CORE_VOCABULARY_BATCH_SEARCH_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/keys_by_segment.h"
#include "cc/core/keys/row_uses.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/core/memory/raw_array.h"
#include "cc/core/simd/key_kernels.h"

namespace layoutmap {

// The rows of the keys of a batch, grouped by segment. The search has this
// order:
//
// 1. In parts of the batch, find the rows of the keys.
// 2. Move the found rows to the places of their segments.
//
// If most keys have a row, this order is faster than `KeysBySegment`, which
// moves the keys to the places of their segments before the search. A row and a
// position take half of the memory of a key, a position and a bucket, and the
// rows are in the order of the batch without another pass. If most keys are
// new, `KeysBySegment` is faster, because a search for a new key visits four
// buckets, which are then in the cache.
class BatchSearch {
 public:
  // Returns the lanes of each segment. Returns an empty vector if a segment is
  // not contiguous in one shard. In this case, a BatchSearch is not possible.
  static std::vector<const int64_t*> LanesOfSegments(
      const BucketLayout& layout, const VocabularyState& state);

  // `keys` must have fewer than 2^32 - 1 values.
  BatchSearch(const BucketLayout& layout,
              const std::vector<const int64_t*>& lanes,
              Span<const int64_t> keys, const KeyKernels& kernels,
              const ParallelFor& parallel_for);

  const SegmentPlaces& places() const { return places_; }
  // The segment of each key, in the order of the batch.
  const uint8_t* segments() const { return segments_.data(); }
  // The row of each key relative to the first row of its segment, in the order
  // of the batch. If the key has no row, the value is kNoRelativeRow or
  // kNoRowButSpace.
  Span<uint32_t> rows() const { return rows_; }
  // The same rows with their positions, in the order of the places.
  Span<RowUse> uses() const { return uses_; }
  // Whether the batch contains kEmptyKey.
  bool has_empty_key() const { return has_empty_key_; }
  int64_t num_probes() const { return num_probes_; }

 private:
  RawArray<uint8_t> segments_;
  RawArray<uint32_t> rows_;
  RawArray<RowUse> uses_;
  SegmentPlaces places_;
  bool has_empty_key_ = false;
  int64_t num_probes_ = 0;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_VOCABULARY_BATCH_SEARCH_H_
