// Norms and inner products of the gradients of one batch.

#ifndef TF_LAYOUTMAP_CORE_STEPS_GRADIENT_COORDINATES_H_
#define TF_LAYOUTMAP_CORE_STEPS_GRADIENT_COORDINATES_H_

#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"

namespace layoutmap {

// Returns the coordinates of the last of several gradients of one batch, in the
// orthonormal basis that the Gram-Schmidt process computes from the gradients:
//
//   coordinates[i] = inner product of the gradient and basis vector i
//
// The last coordinate is the length of the part that is orthogonal to the
// earlier gradients. The Euclidean norm of the coordinates is therefore the
// norm of the gradient, and the inner product of the coordinates of two
// gradients is the inner product of the gradients.
//
// The gradient of a table has one row for each id: the gradient of the output,
// times the gain of the id. Rows of equal ids are not summed, as in the
// `tf.IndexedSlices` of a stock layer. Results do not depend on the number of
// threads. If a value of the last gradient is not finite, the last coordinate
// is not finite, even if no id uses the value.
std::vector<float> GradientCoordinates(
    const EngineConfig& config, const Batch& batch,
    const std::vector<BatchGradients>& gradients,
    const ParallelFor& parallel_for);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_STEPS_GRADIENT_COORDINATES_H_
