// Ops that read the records of a server. docs/ops.md documents the ops.

#include "cc/ops/ports.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace layoutmap {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ScalarShape;
using tensorflow::shape_inference::UnknownShape;

REGISTER_OP("LayoutMap>WatchServerRows")
    .Input("server: resource")
    .Output("watch: int64")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc(R"doc(
Starts to record which rows of a server change.

server: Output of `CreateServer`.
watch: Number that `TakeServerRows` requires. Earlier numbers become invalid.
)doc");

REGISTER_OP("LayoutMap>RecordServerRows")
    .Input("server: resource")
    .Input("rows: int64")
    .Attr("piece: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Records rows that were written other than by a step.

server: Output of `CreateServer`.
rows: Rows of the shard, [num_rows]. Negative rows are ignored.
piece: Index of the shard among the shards of the server.
)doc");

REGISTER_OP("LayoutMap>TakeServerRows")
    .Input("server: resource")
    .Input("watch: int64")
    .Input("also: num_shards * int64")
    .Input("shards: num_shards * resource")
    .Input("slots: num_slot_shards * resource")
    .Input("lanes: num_lanes * resource")
    .Output("values: Tvalues")
    .Attr("num_shards: int >= 1")
    .Attr("num_slot_shards: int >= 0")
    .Attr("num_lanes: int >= 0")
    .Attr("Tvalues: list(type) >= 1")
    .SetIsStateful()
    .SetShapeFn(UnknownShape)
    .Doc(R"doc(
Copies the rows of a server that have changed since the last call.

server: Output of `CreateServer`.
watch: Output of the last `WatchServerRows`.
also: For each shard, further rows to copy.
shards: As in `CreateServer`.
slots: As in `CreateServer`.
lanes: For each shard that owns a vocabulary: its keys, last steps and counts.
values: For each shard: the changed rows in ascending order, int64 [num_rows];
  their values; the values of each slot variable; for a shard that owns a
  vocabulary also the keys, last steps and counts, [num_rows].
)doc");

REGISTER_OP("LayoutMap>KeepEvictedRows")
    .Input("server: resource")
    .Attr("piece: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Starts to store the evicted keys of a shard, with their rows.

server: Output of `CreateServer`.
piece: Index of the shard among the shards of the server.
)doc");

REGISTER_OP("LayoutMap>ReadEvictedRows")
    .Input("server: resource")
    .Input("reported: int64")
    .Output("next: int64")
    .Output("keys: int64")
    .Output("values: Tvalues")
    .Attr("piece: int >= 0")
    .Attr("max_bytes: int >= 1")
    .Attr("Tvalues: list(type) >= 1")
    .SetIsStateful()
    .SetShapeFn(UnknownShape)
    .Doc(R"doc(
Reads the evicted keys of a shard that were not read yet.

server: Output of `CreateServer`.
reported: Output `next` of the last call whose keys were reported, or 0. The
  server deletes the keys of this call and of earlier calls.
next: Value for `reported` after the keys of this call were reported.
keys: Evicted keys in the order of their evictions, [num_keys]. Empty if there
  are no more keys.
values: Values of the keys' rows and of each slot variable, before the server
  has assigned the rows to other keys.
piece: Index of the shard among the shards of the server.
max_bytes: Size of the result after which the op adds no further evictions.
)doc");

REGISTER_OP("LayoutMap>RetireServer")
    .Input("server: resource")
    .Attr("retired: bool = true")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Lets all later ops with this handle fail, because the variables were replaced.

server: Output of `CreateServer`.
retired: If False, later ops succeed again.
)doc");

}  // namespace
}  // namespace layoutmap
