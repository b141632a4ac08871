// Uniform random numbers, which tf.dtensor refuses to run in TensorFlow's own
// op, and the first values of tables. docs/ops.md has the contract in one
// table.

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
Draws the first values of a table, in memory that is cheap to read at random.

The numbers that TensorFlow's operations draw with the same generator, times
`factor`, plus `offset`, bit for bit.

shape: Shape of the output, [rank].
generator: The counter and the key of TensorFlow's Philox generator, [3].
factor: A scalar.
offset: A scalar; with "constant" the value of every element.
distribution: Uniform in [0, 1), or with mean 0 and deviation 1.
)doc");

REGISTER_OP("LayoutMap>BytesDrawn")
    .Output("size: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Returns how much the `NewRows` operations of this process have written by now.

Those that still run are counted, so that another thread can tell how far they
are.

size: In bytes, a scalar.
)doc");

}  // namespace
}  // namespace layoutmap
