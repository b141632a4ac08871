#include "cc/core/simd/row_tuning.h"

#include <cstdint>

#include "cc/core/base/row_type.h"

namespace layoutmap {

RowTuning LookupTuning(RowType row_type) {
  // For 16-bit rows, the computation takes longer, so the prefetch distance is
  // shorter.
  return {row_type == RowType::kFloat32 ? 40 : 16, 0, 2048};
}

RowTuning UpdateTuning(RowType row_type, int64_t dim) {
  // Each prefetch loads a row and its slot rows. For wide rows, a few
  // prefetches already fill the queue of memory requests. Two of the narrowest
  // rows can be in the same cache line, and the loop would then prefetch this
  // line twice.
  if (dim >= 64) return {8, 16, 256};
  if (dim <= 8 && row_type == RowType::kFloat32) return {4, 16, 256};
  return {16, 16, 256};
}

}  // namespace layoutmap
