#include "cc/core/keys/find_keys.h"

#include <algorithm>
#include <cstdint>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/core/tables/sharded_view.h"

namespace layoutmap {
namespace {

// Prefetch distance: the number of keys between the prefetch of a key's buckets
// and the search for the key.
constexpr int64_t kAhead = 16;

// Approximate time per key: the time of one cache miss, reduced by the overlap
// with the cache misses of other keys.
constexpr int64_t kNanosecondsPerKey = 20;

}  // namespace

void FindKeys(const BucketLayout& layout,
              const ShardedView<const int64_t>& stored,
              Span<const int64_t> keys, const ParallelFor& parallel_for,
              Span<int64_t> rows) {
  parallel_for(
      keys.size(), kNanosecondsPerKey, [&](int64_t begin, int64_t end) {
        stored.WithRow([&](auto keys_of) {
          int64_t buckets[kAhead];
          int64_t num_probes = 0;
          for (int64_t first = begin; first < end; first += kAhead) {
            const int64_t size = std::min(kAhead, end - first);
            for (int64_t i = 0; i < size; ++i) {
              buckets[i] = layout.BucketOf(keys[first + i]);
              __builtin_prefetch(keys_of(buckets[i]));
            }
            for (int64_t i = 0; i < size; ++i) {
              const int64_t key = keys[first + i];
              rows[first + i] =
                  key == kEmptyKey
                      ? kNoRow
                      : FindRow(layout, keys_of, buckets[i], key, &num_probes);
            }
          }
        });
      });
}

}  // namespace layoutmap
