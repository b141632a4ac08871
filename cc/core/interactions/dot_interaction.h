// The dot products of all pairs of features, as in DLRM (arXiv:1906.00091), and
// their gradient.

#ifndef TF_LAYOUTMAP_CORE_INTERACTIONS_DOT_INTERACTION_H_
#define TF_LAYOUTMAP_CORE_INTERACTIONS_DOT_INTERACTION_H_

#include <cstdint>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"
#include "cc/core/simd/dot_kernels.h"

namespace layoutmap {

// Writes the dot products of the rows of each sample to `out`, [num_samples,
// layout.num_outputs()]. features[i] is a matrix [num_samples, layout.dim]. The
// columns of a product are added in ascending order, so results are bitwise
// identical for any number of threads.
void DotInteraction(const DotLayout& layout, Span<const float* const> features,
                    int64_t num_samples, const DotKernels& kernels,
                    const ParallelFor& parallel_for, float* out);

// Writes the gradient of each feature to out[i], [num_samples, layout.dim].
// `gradients` contains the gradients of the products, [num_samples,
// layout.num_outputs()]. The gradients of zeros above the triangle are ignored.
void DotInteractionGrad(const DotLayout& layout,
                        Span<const float* const> features,
                        const float* gradients, int64_t num_samples,
                        const DotKernels& kernels,
                        const ParallelFor& parallel_for,
                        Span<float* const> out);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_INTERACTIONS_DOT_INTERACTION_H_
