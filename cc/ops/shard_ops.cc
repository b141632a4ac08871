// Ops on one device's shard of a table whose rows tf.dtensor has divided.
// Their shapes fit the policies of tf_layoutmap/dtensor.py.

#include <cstdint>

#include "cc/ops/ports.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace layoutmap {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("LayoutMap>LookupShard")
    .Input("shard_index: int32")
    .Input("shard: resource")
    .Input("ids: Tids")
    .Output("partial_rows: float")
    .Attr("dim: int >= 1")
    .Attr("num_rows: int >= 0")
    .Attr("table: string = ''")
    .Attr("Tids: {int32, int64}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle index, ids;
      int64_t dim;
      TF_RETURN_IF_ERROR(GetShape(c, "shard_index", 3, &index));
      TF_RETURN_IF_ERROR(GetShape(c, "ids", 1, &ids));
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      return SetShape(
          c, "partial_rows",
          c->MakeShape({c->Dim(index, 0), c->Dim(ids, 0), c->MakeDim(dim)}));
    })
    .Doc(R"doc(
Reads the rows of the ids that live in this shard; zeros for the others.

The sum of `partial_rows` over all shards is the lookup.

shard_index: Which shard this is, [num_shards, 1, 1], one on each device.
shard: Float32 variable, [num_rows / num_shards, dim].
ids: Global rows, [num_ids], the same on each device.
partial_rows: [num_shards, num_ids, dim].
dim: Of the table.
num_rows: Of the table; an id outside is refused.
table: For messages.
)doc");

REGISTER_OP("LayoutMap>UpdateShard")
    .Input("shard: resource")
    .Input("slots: num_slots * resource")
    .Input("shard_index: int32")
    .Input("ids: Tids")
    .Input("gradients: float")
    .Input("hyperparameters: float")
    .Attr("num_slots: int >= 0")
    .Attr("optimizer: {'sgd', 'adagrad', 'adagrad_momentum', 'adam', 'ftrl'}")
    .Attr("num_rows: int >= 0")
    .Attr("table: string = ''")
    .Attr("Tids: {int32, int64}")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Sums the gradients of each row of this shard and takes one optimizer step on it.

shard: Float32 variable, [num_rows / num_shards, dim].
slots: The slot variables of the shard.
shard_index: Which shard this is, [num_shards, 1, 1], one on each device.
ids: Global rows, [num_ids], the same on each device.
gradients: [num_ids, dim], the same on each device.
hyperparameters: The numbers of the rule; docs/ops.md lists them.
num_rows: Of the table; an id outside is refused.
table: For messages.
)doc");

}  // namespace
}  // namespace layoutmap
