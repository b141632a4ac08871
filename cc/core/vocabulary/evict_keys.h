// Keys that leave a vocabulary because somebody says so, or with time.

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

// Frees the rows of `keys`; `evicted` are those that had one, in the order of
// `keys`. Refused, with nothing changed, if a row is in use.
Status EvictKeys(const BucketLayout& layout, const VocabularyStep& step,
                 Span<const int64_t> keys, const VocabularyState& state,
                 std::vector<KeyOfRow>* evicted);

// Frees the rows of all keys whose time is over, but those in use; `evicted`
// by row.
void EvictExpired(const BucketLayout& layout, const VocabularyPolicy& policy,
                  const VocabularyStep& step, const VocabularyState& state,
                  std::vector<KeyOfRow>* evicted);

// Gives keys the rows back that one of the above has freed just now.
void TakeBackEvicted(const std::vector<KeyOfRow>& evicted,
                     const VocabularyState& state);

// All keys, by row; neither steps nor counts.
std::vector<KeyOfRow> ListKeys(const BucketLayout& layout,
                               const ShardedView<const int64_t>& stored);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_VOCABULARY_EVICT_KEYS_H_
