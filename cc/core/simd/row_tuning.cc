#include "cc/core/simd/row_tuning.h"

#include <cstdint>

#include "cc/core/base/row_type.h"

namespace layoutmap {

RowTuning LookupTuning(RowType row_type) {
  // Rows of 16 bits take longer to compute with, so fewer are on their way.
  return {row_type == RowType::kFloat32 ? 24 : 16, 0, 2048};
}

RowTuning UpdateTuning(RowType row_type, int64_t dim) {
  // A row and its slot row are asked for together: of wide ones few fill the
  // queue to memory. Of the narrowest, lines are asked for twice.
  if (dim >= 64) return {8, 16, 256};
  if (dim <= 8 && row_type == RowType::kFloat32) return {4, 16, 256};
  return {16, 16, 256};
}

}  // namespace layoutmap
