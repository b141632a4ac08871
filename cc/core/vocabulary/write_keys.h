// Writes the rows of keys on request. Keys without a row get a row without
// admission, and no key is evicted.

#ifndef TF_LAYOUTMAP_CORE_VOCABULARY_WRITE_KEYS_H_
#define TF_LAYOUTMAP_CORE_VOCABULARY_WRITE_KEYS_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/core/vocabulary/admit_keys.h"
#include "cc/core/vocabulary/first_rows.h"

namespace layoutmap {

// Keys to write. `last_steps` and `counts` have one value for each key, or no
// values.
struct KeysToWrite {
  Span<const int64_t> keys;
  Span<const int32_t> last_steps;
  Span<const int32_t> counts;
};

struct WrittenKeys {
  // The keys that had no row before, in the order of the keys. `evicted` is
  // always kEmptyKey.
  std::vector<NewKey> new_keys;
  // Number of keys that got no row.
  int64_t num_full = 0;
};

// Sets `rows` to the row of each key. A key without a row gets the first free
// lane in its buckets. If all lanes are occupied, it gets kNoRow. Keys are
// inserted in the order of `keys`.
//
// A new key has the given last step and count. By default, the last step is
// `step`, the number of the last training step, and the count is 1. A known key
// gets the given count, and the given last step if that step is later than its
// own last step. A last step never decreases, because it pins the rows of steps
// in flight.
//
// The result does not depend on the sharding. If a key is kEmptyKey or occurs
// twice, or if the number of last steps or counts is wrong, or if a value is
// out of range, returns an error and changes nothing.
Status WriteKeys(const BucketLayout& layout, const KeysToWrite& written,
                 int32_t step, const VocabularyState& state, Span<int64_t> rows,
                 WrittenKeys* result);

// Values of rows and of slot variables, in the order of the keys. A null
// pointer means that the values are not written.
struct RowValues {
  // The rows as float32 or as 16-bit values, depending on the type of the
  // table.
  const void* rows = nullptr;
  std::vector<const float*> slots;
};

// Initializes the rows of new keys, and then copies `values` to `rows`. Values
// for kNoRow are ignored.
void WriteRowValues(const FirstRows& table, const WrittenKeys& written,
                    Span<const int64_t> rows, const RowValues& values,
                    const ParallelFor& parallel_for);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_VOCABULARY_WRITE_KEYS_H_
