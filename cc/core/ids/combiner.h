// Combiners of the ids of a sample, expressed as one gain per id.

#ifndef TF_LAYOUTMAP_CORE_IDS_COMBINER_H_
#define TF_LAYOUTMAP_CORE_IDS_COMBINER_H_

#include <cstdint>
#include <string>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"

namespace layoutmap {

enum class Combiner { kSum, kMean, kSqrtn };

Status ParseCombiner(const std::string& name, Combiner* combiner);

// Computes gains[i] for the ids i of each sample. With w = weights[i], or 1 if
// `weights` is empty:
//
//   sum    w
//   mean   w / sum(w)
//   sqrtn  w / sqrt(sum(w^2))
//
// The gain is 0 if the divisor is 0, as in the TPU's kernels. Divisors are
// summed in double precision and in id order, so that results do not depend on
// the caller.
void CombineGains(Combiner combiner, Span<const int64_t> splits,
                  Span<const float> weights, Span<float> gains);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_IDS_COMBINER_H_
