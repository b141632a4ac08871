// Moves the keys of a vocabulary to a vocabulary that has another size.

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

// A key, with its last step and its count in the source vocabulary.
struct KeptKey {
  // The row in the source vocabulary.
  int64_t from;
  int64_t key;
  int32_t last_step;
  int32_t count;
};

struct RowMove {
  int64_t from;
  int64_t to;
};

// Returns all keys in a vocabulary state, ordered by row.
std::vector<KeptKey> KeysOfState(const BucketLayout& layout,
                                 const VocabularyState& state);

// Inserts keys into an empty vocabulary, in descending order of their score at
// `step`. Keys with equal scores are inserted in ascending order of the key. If
// no row is free for a key, the key is dropped. Sets `moves` to the inserted
// keys in this order. If a key occurs twice or is kEmptyKey, returns an error
// and changes nothing.
Status PutKeys(const BucketLayout& layout, const VocabularyPolicy& policy,
               int32_t step, std::vector<KeptKey> keys,
               const VocabularyState& state, std::vector<RowMove>* moves);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_VOCABULARY_MOVE_KEYS_H_
