// Ops that describe a process of a cluster, and store its coordinator.
// docs/ops.md documents the ops.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"

namespace layoutmap {
namespace {

REGISTER_OP("LayoutMap>DescribeProcess")
    .Output("description: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Returns the package versions of the process that executes the op.

description: A JSON object with the versions of `tensorflow` and `tf_layoutmap`.
)doc");

REGISTER_OP("LayoutMap>ClaimProcess")
    .Input("expected: string")
    .Input("claim: string")
    .Output("found: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Replaces the text that the process stores, if it equals `expected`.

The text is empty when the process starts. All coordinators of the process read
and write the same text.

expected: Scalar. The text that is replaced.
claim: Scalar. The new text.
found: The text before the call. The text was replaced if it equals `expected`.
)doc");

}  // namespace
}  // namespace layoutmap
