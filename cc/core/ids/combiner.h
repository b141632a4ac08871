// How the ids of a sample merge: a gain per id.

#ifndef TF_LAYOUTMAP_CORE_IDS_COMBINER_H_
#define TF_LAYOUTMAP_CORE_IDS_COMBINER_H_

#include <cstdint>
#include <string>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"

namespace layoutmap {

enum class Combiner { kSum, kMean, kSqrtn };

Status ParseCombiner(const std::string& name, Combiner* combiner);

// gains[i] for the ids i of sample s, with w = 1 where `weights` is empty:
//
//   sum    w
//   mean   w / sum(w)
//   sqrtn  w / sqrt(sum(w^2))
//
// and 0 where the divisor is 0, as the TPU's own kernels have it. Divisors are
// summed in double, in id order, so that they do not depend on the caller.
void CombineGains(Combiner combiner, Span<const int64_t> splits,
                  Span<const float> weights, Span<float> gains);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_IDS_COMBINER_H_
