// Prefetch distances and tile sizes of the row kernels.

#ifndef TF_LAYOUTMAP_CORE_SIMD_ROW_TUNING_H_
#define TF_LAYOUTMAP_CORE_SIMD_ROW_TUNING_H_

#include <cstdint>

#include "cc/core/base/row_type.h"

namespace layoutmap {

struct RowTuning {
  // Number of rows, and for updates number of gradients, that are prefetched
  // before they are read.
  int64_t ahead = 0;
  int64_t gradients_ahead = 0;
  // Number of ids of a lookup, or of rows of an update, whose pointers are
  // resolved at a time.
  int64_t tile = 0;
};

// Return the settings that were fastest in the measurements in
// docs/benchmarks.md. A tile of 2,048 pointers takes 16 KiB of the first-level
// cache.
RowTuning LookupTuning(RowType row_type);
RowTuning UpdateTuning(RowType row_type, int64_t dim);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SIMD_ROW_TUNING_H_
