// Initializes the rows and the slot variables of new keys.

#ifndef TF_LAYOUTMAP_CORE_VOCABULARY_FIRST_ROWS_H_
#define TF_LAYOUTMAP_CORE_VOCABULARY_FIRST_ROWS_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/first_values.h"
#include "cc/core/simd/key_kernels.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/core/vocabulary/admit_keys.h"

namespace layoutmap {

// A table and the initial values for the rows of new keys.
struct FirstRows {
  FirstValues values;
  RowType row_type = RowType::kFloat32;
  ShardedView<float> table;
  // Used instead of `table` if the table has 16-bit rows.
  ShardedView<uint16_t> half_table;
  std::vector<ShardedView<float>> slots;
  std::vector<float> slot_values;
};

// Writes the initial values of `new_keys` to their rows, which overwrites the
// values of the previous keys. For 16-bit rows, initial values are rounded to
// nearest, ties to even, and must be in the range of the 16-bit type.
void WriteFirstRows(
    const FirstRows& first, Span<const NewKey> new_keys,
    const ParallelFor& parallel_for,
    const KeyKernels& kernels = KeyKernelsFor(CurrentCpuLevel()));

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_VOCABULARY_FIRST_ROWS_H_
