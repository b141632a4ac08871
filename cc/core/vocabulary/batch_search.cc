#include "cc/core/vocabulary/batch_search.h"

#include <cstdint>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/keys_by_segment.h"
#include "cc/core/keys/row_uses.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/core/simd/key_kernels.h"
#include "cc/core/vocabulary/segment_buckets.h"

namespace layoutmap {

std::vector<const int64_t*> BatchSearch::LanesOfSegments(
    const BucketLayout& layout, const VocabularyState& state) {
  std::vector<const int64_t*> lanes(layout.num_segments());
  bool all_contiguous = true;
  WithBuckets(state, [&](const auto& buckets) {
    for (int64_t s = 0; s < layout.num_segments(); ++s) {
      if (!state.HasSegment(layout, s)) continue;
      lanes[s] = KeysInOneShard(layout, buckets, s);
      all_contiguous &= lanes[s] != nullptr;
    }
  });
  if (!all_contiguous) lanes.clear();
  return lanes;
}

BatchSearch::BatchSearch(const BucketLayout& layout,
                         const std::vector<const int64_t*>& lanes,
                         Span<const int64_t> keys, const KeyKernels& kernels,
                         const ParallelFor& parallel_for)
    : segments_(keys.size()),
      rows_(keys.size()),
      uses_(keys.size()),
      places_(layout.num_segments(), keys.size()) {
  std::vector<SearchResult> results(places_.num_parts());
  places_.Assign(
      parallel_for, 8,
      [&](int64_t part, int64_t begin, int64_t end, uint32_t* counts) {
        results[part] = kernels.search(
            {keys.data() + begin, end - begin, layout.num_segments(),
             layout.buckets_per_segment(), layout.num_probes(), lanes.data(),
             segments_.data() + begin, rows_.data() + begin, counts});
      });
  for (const SearchResult& result : results) {
    has_empty_key_ |= result.has_empty_key;
    num_probes_ += result.num_probes;
  }
  const uint32_t* const rows = rows_.data();
  RowUse* const uses = uses_.data();
  places_.ForKeys(parallel_for, 2, segments_.data(),
                  [&](int64_t i, uint8_t, uint32_t place) {
                    __builtin_prefetch(
                        uses + place + SegmentPlaces::kPlacesAhead,
                        /*write=*/1, /*locality=*/2);
                    uses[place] = MakeRowUse(rows[i], static_cast<uint32_t>(i));
                  });
}

}  // namespace layoutmap
