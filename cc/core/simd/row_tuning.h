// Prefetch distances and tile sizes of the row kernels.

#ifndef TF_LAYOUTMAP_CORE_SIMD_ROW_TUNING_H_
#define TF_LAYOUTMAP_CORE_SIMD_ROW_TUNING_H_

#include <cstdint>

#include "cc/core/base/row_type.h"

namespace layoutmap {

struct RowTuning {
  // Prefetch distance in rows. For updates, `gradients_ahead` is the prefetch
  // distance in gradients.
  int64_t ahead = 0;
  int64_t gradients_ahead = 0;
  // Number of ids in a lookup, or of rows in an update, for which the pointers
  // are computed at a time.
  int64_t tile = 0;
};

// These functions return the fastest settings according to the measurements in
// docs/benchmarks.md. A tile of 2,048 pointers takes 16 KiB of the first-level
// cache.
RowTuning LookupTuning(RowType row_type);
RowTuning UpdateTuning(RowType row_type, int64_t dim);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SIMD_ROW_TUNING_H_
