// Finds the rows of keys without changing the vocabulary.

#ifndef TF_LAYOUTMAP_CORE_KEYS_FIND_KEYS_H_
#define TF_LAYOUTMAP_CORE_KEYS_FIND_KEYS_H_

#include <cstdint>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/tables/sharded_view.h"

namespace layoutmap {

// Sets rows[i] to the row of keys[i], or to kNoRow if the vocabulary does not
// contain the key. `stored` contains the keys of the vocabulary, indexed by
// bucket. For kEmptyKey, the result is always kNoRow.
void FindKeys(const BucketLayout& layout,
              const ShardedView<const int64_t>& stored,
              Span<const int64_t> keys, const ParallelFor& parallel_for,
              Span<int64_t> rows);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_KEYS_FIND_KEYS_H_
