// What a process of a cluster says of itself. docs/ops.md has the contract.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"

namespace layoutmap {
namespace {

REGISTER_OP("LayoutMap>DescribeProcess")
    .Output("description: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Tells which versions the process that runs this has.

description: A JSON object with the versions `tensorflow` and `tf_layoutmap`.
)doc");

}  // namespace
}  // namespace layoutmap
