// A table of 16-bit rows, and the noise for the stochastic rounding of its
// rows.

#ifndef TF_LAYOUTMAP_CORE_TABLES_HALF_TABLE_H_
#define TF_LAYOUTMAP_CORE_TABLES_HALF_TABLE_H_

#include <cstdint>

#include "cc/core/base/row_type.h"
#include "cc/core/tables/sharded_view.h"

namespace layoutmap {

// A table of 16-bit rows during an update. The update converts each row to
// float32, changes it, and rounds each value once to one of the two nearest
// 16-bit values. The rounding is stochastic, and its expected value is the
// exact value. The noise depends only on `noise_key`, the row and the column.
struct HalfTable {
  ShardedView<uint16_t> rows;
  RowType type = RowType::kBfloat16;
  uint64_t noise_key = 0;
  // Index of the first row of `rows` in the full table.
  int64_t first_row = 0;
};

// These functions return the noise key of a table in one step, and the noise
// key of a row.
uint64_t NoiseKey(uint64_t seed, uint64_t table, uint64_t step);
uint64_t NoiseKeyOfRow(uint64_t noise_key, uint64_t row);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_TABLES_HALF_TABLE_H_
