// An op that describes a process of a cluster. docs/ops.md documents the op.

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

}  // namespace
}  // namespace layoutmap
