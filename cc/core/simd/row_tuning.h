// How far ahead rows are prefetched, and how many are worked on at a time.

#ifndef TF_LAYOUTMAP_CORE_SIMD_ROW_TUNING_H_
#define TF_LAYOUTMAP_CORE_SIMD_ROW_TUNING_H_

#include <cstdint>

#include "cc/core/base/row_type.h"

namespace layoutmap {

struct RowTuning {
  // Rows that are asked for before they are read; of an update, gradients, too.
  int64_t ahead = 0;
  int64_t gradients_ahead = 0;
  // Ids, or rows of an update, whose pointers are resolved at a time.
  int64_t tile = 0;
};

// Chosen by measurement: docs/benchmarks.md has the figures. 2,048 pointers
// are 16 KiB of the first-level cache.
RowTuning LookupTuning(RowType row_type);
RowTuning UpdateTuning(RowType row_type, int64_t dim);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SIMD_ROW_TUNING_H_
