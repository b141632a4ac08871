// A table of 16-bit rows, and the noise for stochastic rounding.

#ifndef TF_LAYOUTMAP_CORE_TABLES_HALF_TABLE_H_
#define TF_LAYOUTMAP_CORE_TABLES_HALF_TABLE_H_

#include <cstdint>

#include "cc/core/base/row_type.h"
#include "cc/core/tables/sharded_view.h"

namespace layoutmap {

// A table of 16-bit rows during an update. A row is converted to float32,
// updated, and rounded once to one of the two neighboring values. The
// probability of rounding up makes the mean of many roundings exact. The noise
// only depends on `noise_key`, the row and the column.
struct HalfTable {
  ShardedView<uint16_t> rows;
  RowType type = RowType::kBfloat16;
  uint64_t noise_key = 0;
  int64_t first_row = 0;  // index of the first row of `rows` in the table
};

// Return the noise keys of a table in a step, and of one of its rows.
uint64_t NoiseKey(uint64_t seed, uint64_t table, uint64_t step);
uint64_t NoiseKeyOfRow(uint64_t noise_key, uint64_t row);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_TABLES_HALF_TABLE_H_
