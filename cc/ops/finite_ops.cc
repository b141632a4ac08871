// Op that checks for NaN and infinity. docs/ops.md documents the op.

#include "cc/ops/ports.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace layoutmap {
namespace {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("LayoutMap>AllFinite")
    .Input("tensors: num_tensors * float")
    .Output("all_finite: bool")
    .Attr("num_tensors: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      return SetShape(c, "all_finite", c->Scalar());
    })
    .Doc(R"doc(
Returns whether no element of any tensor is NaN or infinite.

tensors: Tensors of any shapes.
all_finite: A scalar.
)doc");

}  // namespace
}  // namespace layoutmap
