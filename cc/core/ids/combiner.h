// Computes the gain of each id in a sample for the combiner of a feature.

#ifndef TF_LAYOUTMAP_CORE_IDS_COMBINER_H_
#define TF_LAYOUTMAP_CORE_IDS_COMBINER_H_

#include <cstdint>
#include <string>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"

namespace layoutmap {

enum class Combiner { kSum, kMean, kSqrtn };

Status ParseCombiner(const std::string& name, Combiner* combiner);

// Computes gains[i] for each id i of each sample. In this table, w is
// weights[i], or 1 if `weights` is empty, and the sums are over the sample:
//
//   sum    w
//   mean   w / sum(w)
//   sqrtn  w / sqrt(sum(w^2))
//
// If the divisor is 0, the gain is 0. The TPU kernels use the same definition.
// The function sums the divisors in double precision and in id order, so that
// all callers get the same results.
void CombineGains(Combiner combiner, Span<const int64_t> splits,
                  Span<const float> weights, Span<float> gains);

// Computes the gain of each output, [num_outputs], for ids without weights. All
// ids of an output have this gain, and it equals the result of `CombineGains`.
void CombineOutputGains(Combiner combiner, Span<const int64_t> splits,
                        Span<float> gains);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_IDS_COMBINER_H_
