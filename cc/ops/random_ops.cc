// Uniform random numbers, which tf.dtensor refuses to run in TensorFlow's own
// op. docs/ops.md has the contract in one table.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace layoutmap {
namespace {

REGISTER_OP("LayoutMap>RandomUniform")
    .Input("shape: T")
    .Output("output: dtype")
    .Attr("seed: int = 0")
    .Attr("seed2: int = 0")
    .Attr("dtype: {half, bfloat16, float, double}")
    .Attr("T: {int32, int64}")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::RandomShape)
    .Doc(R"doc(
Draws what `RandomUniform` draws with the same seeds, bit for bit.

shape: Shape of the output, [rank].
output: Numbers in [0, 1).
seed: First half of the seed.
seed2: Second half of the seed.
)doc");

REGISTER_OP("LayoutMap>RandomUniformInt")
    .Input("shape: T")
    .Input("minval: Tout")
    .Input("maxval: Tout")
    .Output("output: Tout")
    .Attr("seed: int = 0")
    .Attr("seed2: int = 0")
    .Attr("Tout: {int32, int64}")
    .Attr("T: {int32, int64}")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::RandomShape)
    .Doc(R"doc(
Draws what `RandomUniformInt` draws with the same seeds, bit for bit.

shape: Shape of the output, [rank].
minval: The smallest number, a scalar.
maxval: One more than the largest number, a scalar; above `minval`.
output: Numbers in [minval, maxval).
seed: First half of the seed.
seed2: Second half of the seed.
)doc");

}  // namespace
}  // namespace layoutmap
