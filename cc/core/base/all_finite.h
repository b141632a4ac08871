// A check for NaN and infinity.

#ifndef TF_LAYOUTMAP_CORE_BASE_ALL_FINITE_H_
#define TF_LAYOUTMAP_CORE_BASE_ALL_FINITE_H_

#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"

namespace layoutmap {

// Returns whether no value of the arrays is NaN or infinite.
bool AllFinite(const std::vector<Span<const float>>& arrays,
               const ParallelFor& parallel_for);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_BASE_ALL_FINITE_H_
