// Admits keys in a training step: finds the rows of known keys, counts all
// keys, and assigns rows to new keys.

#ifndef TF_LAYOUTMAP_CORE_VOCABULARY_ADMIT_KEYS_H_
#define TF_LAYOUTMAP_CORE_VOCABULARY_ADMIT_KEYS_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/policy.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/core/simd/key_kernels.h"

namespace layoutmap {

struct RowGroups;

// The order in which a step searches for its keys. The results are the same.
enum class SearchOrder {
  // Selects the faster order by a sample of the keys.
  kAuto,
  // Searches in the order of the batch (BatchSearch), if possible.
  kByBatch,
  // Groups the keys by segment before the search (KeysBySegment).
  kBySegment,
};

// The number of a training step, and the rows that other steps use. Each row
// stores the number of the last step that used it, so that the number of a step
// in flight is sufficient to pin its rows.
struct VocabularyStep {
  // Number of the step, which must be at least 1 and must not decrease.
  int32_t number = 1;
  // Number of the oldest step in flight, which can be this step. Rows that were
  // used in this step or later are not evicted.
  int32_t oldest_in_flight = 1;
  // Rows that are used by lookups that do not count uses, in ascending order.
  Span<const int64_t> pinned_rows;
  // Whether the result must contain `take_back`, which restores the state
  // before the step.
  bool keeps_old = false;
  SearchOrder search = SearchOrder::kAuto;
};

// A key to which this step assigned a row.
struct NewKey {
  int64_t row;
  int64_t key;
  // The previous key of the row, or kEmptyKey if the row was free.
  int64_t evicted;
};

struct VocabularyCounts {
  // Keys in all steps.
  int64_t num_lookups = 0;
  // Keys that already had a row.
  int64_t num_known = 0;
  // Buckets that searches visited.
  int64_t num_probes = 0;
  // New keys that got a row, without duplicates.
  int64_t num_admitted = 0;
  // New keys that the policy did not admit.
  int64_t num_rejected = 0;
  // Keys that the policy admitted, but that got no row.
  int64_t num_full = 0;
  // Keys that lost their row.
  int64_t num_evicted = 0;
  // Evicted keys that had expired.
  int64_t num_expired = 0;
};

struct AdmittedKeys {
  // The new keys, ordered by segment. The keys of a segment are in insertion
  // order.
  Span<const NewKey> new_keys;
  std::shared_ptr<const void> new_keys_memory;
  VocabularyCounts counts;
  // The unique rows of all keys that have a row. There is one part per segment.
  std::shared_ptr<RowGroups> groups;
  // Restores the state before the step. This function is set if `keeps_old` is
  // true. The memory of the state may have moved since the step, but its values
  // must not have changed. The function does not access the arguments of
  // `AdmitKeys`.
  std::function<void(const VocabularyState&)> take_back;
};

// Counts one use of each key in `keys`, and inserts the new keys that the
// policy admits. Sets `rows` to the row of each key, or to kNoRow.
//
// The function first counts the keys that have a row. It then inserts the new
// keys of each segment in the order of their first occurrence. A new key gets
// the first free lane in its buckets. If no lane is free, the new key gets the
// row of an expired key. If no key has expired, the new key gets the row of the
// key with the lowest score. Keys whose rows are in use are not evicted.
//
// The result does not depend on the number of threads, on the sharding or on
// the instruction set. `keys` must have fewer than 2^32 - 1 values and must not
// contain kEmptyKey. If no row is free for an admitted key and
// `fails_when_full` is set, the function returns an error and leaves the state
// unchanged.
Status AdmitKeys(const BucketLayout& layout, const VocabularyPolicy& policy,
                 const VocabularyStep& step, Span<const int64_t> keys,
                 const ParallelFor& parallel_for, const VocabularyState& state,
                 Span<int64_t> rows, AdmittedKeys* admitted,
                 const KeyKernels& kernels = KeyKernelsFor(CurrentCpuLevel()));

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_VOCABULARY_ADMIT_KEYS_H_
