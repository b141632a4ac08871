// Ops that create uniform random numbers and the initial values of tables.
// These ops exist because tf.dtensor does not support TensorFlow's own ops for
// uniform random numbers. docs/ops.md documents the ops.

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
Returns bitwise the same numbers as `RandomUniform` with the same seeds.

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
Returns bitwise the same numbers as `RandomUniformInt` with the same seeds.

shape: Shape of the output, [rank].
minval: Smallest number, a scalar.
maxval: Exclusive upper bound, a scalar larger than `minval`.
output: Numbers in [minval, maxval).
seed: First half of the seed.
seed2: Second half of the seed.
)doc");

REGISTER_OP("LayoutMap>NewRows")
    .Input("shape: T")
    .Input("generator: uint64")
    .Input("factor: dtype")
    .Input("offset: dtype")
    .Output("output: dtype")
    .Attr("distribution: {'uniform', 'normal', 'truncated_normal', 'constant'}")
    .Attr("dtype: {half, bfloat16, float, double}")
    .Attr("T: {int32, int64}")
    .SetShapeFn(tensorflow::shape_inference::RandomShape)
    .Doc(R"doc(
Returns the initial values of a table in memory that is fast to read at random.

The values are bitwise equal to the numbers that TensorFlow's ops generate from
the same generator, times `factor`, plus `offset`.

shape: Shape of the output, [rank].
generator: Counter and key of TensorFlow's Philox generator, [3].
factor: A scalar.
offset: A scalar; with "constant", the value of every element.
distribution: Distribution of the numbers before scaling: uniform in [0, 1), or
  with mean 0 and standard deviation 1.
)doc");

REGISTER_OP("LayoutMap>BytesDrawn")
    .Output("size: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Returns the number of bytes that `NewRows` ops of this process have written.

Ops that are still running are included, so another thread can measure their
progress.

size: Number of bytes, a scalar.
)doc");

}  // namespace
}  // namespace layoutmap
