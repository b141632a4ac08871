// What a training step does to a vocabulary: its keys are found, counted, and
// new ones get a row.

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

// The step, and which rows others still work on. Each row knows the last step
// that used it, so that a step in flight pins its rows by its number alone.
struct VocabularyStep {
  int32_t number = 1;  // at least 1, and not below that of any earlier step
  // The oldest step in flight, this one among them. Rows that were used since
  // are never given away.
  int32_t oldest_in_flight = 1;
  // Rows that are in use besides, by lookups that count no use. Ascending.
  Span<const int64_t> pinned_rows;
  // Whether the state may be asked back as it was before.
  bool keeps_old = false;
};

// A key that got a row in this step.
struct NewKey {
  int64_t row;
  int64_t key;
  int64_t evicted;  // the key that had the row; kEmptyKey if none
};

struct VocabularyCounts {
  int64_t num_lookups = 0;   // keys of all steps
  int64_t num_known = 0;     // of them: had a row already
  int64_t num_probes = 0;    // buckets that were looked into
  int64_t num_admitted = 0;  // new keys that got a row, each once
  int64_t num_rejected = 0;  // new keys of a step that were not admitted
  int64_t num_full = 0;      // that were admitted and found no place
  int64_t num_evicted = 0;   // keys that gave their row away
  int64_t num_expired = 0;   // of them: because their time was over
};

struct AdmittedKeys {
  Span<const NewKey>
      new_keys;  // by segment, in the order of their rows' giving
  std::shared_ptr<const void> new_keys_memory;
  VocabularyCounts counts;
  // The rows of all keys that have one; a part for each segment.
  std::shared_ptr<RowGroups> groups;
  // Makes a state what it was before the step, where the step `keeps_old`. The
  // state may have moved, but nothing else may have changed it since. Needs
  // none of the arguments of `AdmitKeys`.
  std::function<void(const VocabularyState&)> take_back;
};

// Counts a use of each of `keys`, gives new ones a row if the policy admits
// them, and says the row of each, or kNoRow.
//
// All keys that have a row are counted first. Then new ones come in the order
// in which they first occur among those of their segment: into the first free
// lane of their buckets, else into the row of an expired key, else into that of
// the key with the lowest score. No row that is in use is given away.
//
// The result depends on neither threads nor shards nor kernels. `keys` have at
// most 2^32 values, none of them kEmptyKey. If a key finds no place and the
// policy calls that an error, the state is as before.
Status AdmitKeys(const BucketLayout& layout, const VocabularyPolicy& policy,
                 const VocabularyStep& step, Span<const int64_t> keys,
                 const ParallelFor& parallel_for, const VocabularyState& state,
                 Span<int64_t> rows, AdmittedKeys* admitted,
                 const KeyKernels& kernels = KeyKernelsFor(CurrentCpuLevel()));

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_VOCABULARY_ADMIT_KEYS_H_
