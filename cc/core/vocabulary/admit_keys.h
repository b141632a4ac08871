// Admission of keys in a training step: keys are found and counted, and new
// keys get a row.

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

// The number of the step, and the rows that other steps use. Each row stores
// the last step that used it, so that the number of a step in flight is
// sufficient to pin its rows.
struct VocabularyStep {
  int32_t number = 1;  // at least 1, and never decreasing
  // The oldest step in flight, possibly this one. Rows that were used since
  // then are not evicted.
  int32_t oldest_in_flight = 1;
  // Ascending rows that are in use by lookups that do not count uses.
  Span<const int64_t> pinned_rows;
  // Whether `take_back` must be available to restore the state before the step.
  bool keeps_old = false;
};

// A key that got a row in this step.
struct NewKey {
  int64_t row;
  int64_t key;
  int64_t evicted;  // previous key of the row; kEmptyKey if none
};

struct VocabularyCounts {
  int64_t num_lookups = 0;   // keys in all steps
  int64_t num_known = 0;     // keys that already had a row
  int64_t num_probes = 0;    // visited buckets
  int64_t num_admitted = 0;  // new keys that got a row, without duplicates
  int64_t num_rejected = 0;  // new keys that the policy did not admit
  int64_t num_full = 0;      // admitted keys without a free row
  int64_t num_evicted = 0;   // keys that lost their row
  int64_t num_expired = 0;   // evicted keys that had expired
};

struct AdmittedKeys {
  Span<const NewKey> new_keys;  // by segment, in insertion order
  std::shared_ptr<const void> new_keys_memory;
  VocabularyCounts counts;
  // The rows of all keys that have one; one part per segment.
  std::shared_ptr<RowGroups> groups;
  // Restores the state before the step. Set if the step has `keeps_old`. The
  // state may have moved in memory since the step, but its values must be
  // unchanged. The function does not access the arguments of `AdmitKeys`.
  std::function<void(const VocabularyState&)> take_back;
};

// Counts a use of each of `keys`, inserts the new keys that the policy admits,
// and returns the row of each key in `rows`, or kNoRow.
//
// Keys that have a row are counted first. New keys are then inserted in the
// order of their first occurrence in their segment. A new key gets the first
// free lane of its buckets. If no lane is free, it gets the row of an expired
// key, and if no key has expired, the row of the key with the lowest score.
// Rows in use are not evicted.
//
// The result does not depend on threads, shards or kernels. `keys` must have
// fewer than 2^32 - 1 values, and kEmptyKey is not a valid key. If a key has no
// free row and `fails_when_full` is set, an error is returned and the state is
// unchanged.
Status AdmitKeys(const BucketLayout& layout, const VocabularyPolicy& policy,
                 const VocabularyStep& step, Span<const int64_t> keys,
                 const ParallelFor& parallel_for, const VocabularyState& state,
                 Span<int64_t> rows, AdmittedKeys* admitted,
                 const KeyKernels& kernels = KeyKernelsFor(CurrentCpuLevel()));

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_VOCABULARY_ADMIT_KEYS_H_
