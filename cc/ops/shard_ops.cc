// Ops on one device's shard of a table. tf.dtensor shards the rows of the
// table. The shapes of the ops must match the policies in
// tf_layoutmap/_core/dtensor_ops.py.

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
Reads the rows of the ids that this shard owns; returns zeros for other ids.

The sum of `partial_rows` over all shards is the lookup.

shard_index: Index of the shard, [num_shards, 1, 1], one value on each device.
shard: Float32 variable, [num_rows / num_shards, dim].
ids: Global rows, [num_ids], the same on each device.
partial_rows: [num_shards, num_ids, dim].
dim: Number of columns of the table.
num_rows: Number of rows of the table. An id outside of the table is an error.
table: Name of the table, for error messages.
)doc");

REGISTER_OP("LayoutMap>UpdateShard")
    .Input("shard: resource")
    .Input("slots: num_slots * resource")
    .Input("shard_index: int32")
    .Input("ids: Tids")
    .Input("gradients: float")
    .Input("hyperparameters: float")
    .Attr("num_slots: int >= 0")
    .Attr(
        "optimizer: {'sgd', 'adagrad', 'adagrad_momentum', 'adam', 'ftrl', "
        "'momentum', 'rmsprop'}")
    .Attr("num_rows: int >= 0")
    .Attr("table: string = ''")
    .Attr("Tids: {int32, int64}")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Sums the gradients of each row of this shard and applies one optimizer step.

shard: Float32 variable, [num_rows / num_shards, dim].
slots: The slot variables of the shard.
shard_index: Index of the shard, [num_shards, 1, 1], one value on each device.
ids: Global rows, [num_ids], the same on each device.
gradients: [num_ids, dim], the same on each device.
hyperparameters: Hyperparameters of the optimizer; docs/ops.md lists them.
num_rows: Number of rows of the table. An id outside of the table is an error.
table: Name of the table, for error messages.
)doc");

}  // namespace
}  // namespace layoutmap
