#include "cc/core/simd/row_tuning.h"

#include <cstdint>

#include "cc/core/base/row_type.h"

namespace layoutmap {

RowTuning LookupTuning(RowType row_type) {
  // Computing with 16-bit rows takes longer, so fewer rows are prefetched.
  return {row_type == RowType::kFloat32 ? 24 : 16, 0, 2048};
}

RowTuning UpdateTuning(RowType row_type, int64_t dim) {
  // A row and its slot row are prefetched together. A few wide rows already
  // fill the queue of memory requests. Cache lines of the narrowest rows would
  // be prefetched twice.
  if (dim >= 64) return {8, 16, 256};
  if (dim <= 8 && row_type == RowType::kFloat32) return {4, 16, 256};
  return {16, 16, 256};
}

}  // namespace layoutmap
