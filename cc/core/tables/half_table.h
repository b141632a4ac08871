// A table of 16-bit rows, and the noise that rounds them.

#ifndef TF_LAYOUTMAP_CORE_TABLES_HALF_TABLE_H_
#define TF_LAYOUTMAP_CORE_TABLES_HALF_TABLE_H_

#include <cstdint>

#include "cc/core/base/row_type.h"
#include "cc/core/tables/sharded_view.h"

namespace layoutmap {

// A table of 16-bit rows that is being updated. A row is read as float32, takes
// its step, and is rounded once to one of its two neighbours, up with the
// chance that makes the mean of many roundings exact. The chance is decided by
// `noise_key`, the row and the column alone.
struct HalfTable {
  ShardedView<uint16_t> rows;
  RowType type = RowType::kBfloat16;
  uint64_t noise_key = 0;
  int64_t first_row = 0;  // where `rows` begin in the table that they are of
};

// One key per seed, table and step.
uint64_t NoiseKey(uint64_t seed, uint64_t table, uint64_t step);
uint64_t NoiseKeyOfRow(uint64_t noise_key, uint64_t row);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_TABLES_HALF_TABLE_H_
