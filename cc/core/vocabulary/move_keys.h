// The keys of a vocabulary in one of another size.

#ifndef TF_LAYOUTMAP_CORE_VOCABULARY_MOVE_KEYS_H_
#define TF_LAYOUTMAP_CORE_VOCABULARY_MOVE_KEYS_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/policy.h"
#include "cc/core/keys/vocabulary_state.h"

namespace layoutmap {

// A key and what is known of it, wherever it comes from.
struct KeptKey {
  int64_t from;  // its row there
  int64_t key;
  int32_t last_step;
  int32_t count;
};

struct RowMove {
  int64_t from;
  int64_t to;
};

// All keys of a state, by row.
std::vector<KeptKey> KeysOfState(const BucketLayout& layout,
                                 const VocabularyState& state);

// Puts keys into a vocabulary that has none. Those with the highest score at
// `step` come first, of equal ones the lowest key; one that then finds no place
// is dropped. `moves` are those that found one, in that order. Refused, with
// nothing changed, if a key comes twice or is kEmptyKey.
Status PutKeys(const BucketLayout& layout, const VocabularyPolicy& policy,
               int32_t step, std::vector<KeptKey> keys,
               const VocabularyState& state, std::vector<RowMove>* moves);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_VOCABULARY_MOVE_KEYS_H_
