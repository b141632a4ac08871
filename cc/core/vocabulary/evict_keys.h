// Evicts keys on request, or after their time to live.

#ifndef TF_LAYOUTMAP_CORE_VOCABULARY_EVICT_KEYS_H_
#define TF_LAYOUTMAP_CORE_VOCABULARY_EVICT_KEYS_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/policy.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/core/vocabulary/admit_keys.h"

namespace layoutmap {

struct KeyOfRow {
  int64_t row;
  int64_t key;
  int32_t last_step = 0;
  int32_t count = 0;
};

// Evicts `keys`. Sets `evicted` to the keys that had a row, in the order of
// `keys`. If a step uses one of the rows, returns an error and changes nothing.
Status EvictKeys(const BucketLayout& layout, const VocabularyStep& step,
                 Span<const int64_t> keys, const VocabularyState& state,
                 std::vector<KeyOfRow>* evicted);

// Evicts all expired keys whose rows are not in use. Sets `evicted` to these
// keys, ordered by row.
void EvictExpired(const BucketLayout& layout, const VocabularyPolicy& policy,
                  const VocabularyStep& step, const VocabularyState& state,
                  std::vector<KeyOfRow>* evicted);

// Restores the keys that the last call of `EvictKeys` or `EvictExpired`
// evicted.
void TakeBackEvicted(const std::vector<KeyOfRow>& evicted,
                     const VocabularyState& state);

// Returns all keys, ordered by row. The elements do not contain steps or
// counts.
std::vector<KeyOfRow> ListKeys(const BucketLayout& layout,
                               const ShardedView<const int64_t>& stored);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_VOCABULARY_EVICT_KEYS_H_
