// Ops that write and read the rows of keys. docs/ops.md documents the ops.

#include "absl/status/status.h"
#include "cc/ops/ports.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace layoutmap {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("LayoutMap>WriteKeys")
    .Input("engine: num_engines * resource")
    .Input("server: num_servers * resource")
    .Input("state: num_state * resource")
    .Input("shards: num_shards * resource")
    .Input("slots: num_slot_shards * resource")
    .Input("fetched_steps: num_fetched * resource")
    .Input("sharing_shards: num_sharing_shards * resource")
    .Input("keys: int64")
    .Input("last_steps: int32")
    .Input("counts: int32")
    .Input("step: int64")
    .Input("values: dtype")
    .Input("slot_values: num_slots * float")
    .Output("rows: int64")
    .Output("num_new: int64")
    .Attr("num_engines: int >= 0")
    .Attr("num_servers: int >= 0")
    .Attr("num_state: int >= 4")
    .Attr("num_shards: int >= 1")
    .Attr("num_slot_shards: int >= 0")
    .Attr("num_fetched: int >= 0")
    .Attr("num_sharing_shards: int >= 0")
    .Attr("num_slots: int >= 0")
    .Attr("dtype: {float, bfloat16, half}")
    .Attr("table: string")
    .Attr("table_index: int")
    .Attr("first_bucket: int >= 0")
    .Attr("vocabulary_buckets: int >= 1")
    .Attr("has_sketch: bool")
    .Attr("key_kind: int")
    .Attr("first_values: string")
    .Attr("first_limits: list(float)")
    .Attr("first_seed: int")
    .Attr("initial_slots: list(float)")
    .Attr("sharing: list(int) = []")
    .Attr("sharing_first_values: list(string) = []")
    .Attr("sharing_first_limits: list(float) = []")
    .Attr("sharing_first_seeds: list(int) = []")
    .Attr("sharing_initial_slots: list(float) = []")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle keys;
      TF_RETURN_IF_ERROR(GetShape(c, "keys", &keys));
      TF_RETURN_IF_ERROR(SetShape(c, "rows", keys));
      return SetShape(c, "num_new", c->Scalar());
    })
    .Doc(R"doc(
Writes the rows of keys. Keys without a row get a row without admission.

engine: The engine, which records the changed rows, or no engine.
server: Output of `CreateServer` on a server, otherwise no resource. The caller
  records the changed rows with `RecordServerRows`.
state: State of the shards, as in `EvictKeys`.
shards: Shards of the table.
slots: One slot variable after the other, shard by shard.
fetched_steps: As in `CreateServer` on a server, otherwise no variable.
sharing_shards: For each table in `sharing`, its shards, then its slot
  variables. The rows of new keys get initial values in these tables.
keys: Distinct keys, [num_keys]. All places of the keys must be in the shards.
last_steps: Last step of each key, or an empty tensor: the step of the
  vocabulary for new keys.
counts: Count of each key, or an empty tensor: 1 for new keys.
step: Step of the vocabulary, if this step is later.
values: Rows of the keys, [num_keys, dim], or [0, dim]: known keys keep their
  rows, and new keys get initial values.
slot_values: Values of the slot variables, [num_keys, slot_dim] or
  [0, slot_dim], as for `values`.
rows: Row of each key, or -1 if no row was free for the key.
num_new: Number of keys that had no row before.
table: Name of the table, for error messages.
table_index: Index of the table in the engine.
first_bucket: First bucket of the first shard.
vocabulary_buckets: Number of buckets of the full vocabulary.
has_sketch: Whether `state` contains a sketch.
key_kind: Kind of the keys: 1 integers, 2 strings.
first_values: Distribution of the initial values, as in `FirstRows`.
first_limits: Two numbers of the distribution.
first_seed: Seed of the distribution.
initial_slots: Initial value of each slot variable.
sharing: Indices of the other tables that use the same vocabulary: tables of the
  engine, or shards of the server.
sharing_first_values: For each of them, as `first_values`. The other attributes
  about `sharing` are concatenated in the same way.
)doc");

REGISTER_OP("LayoutMap>ReadKeys")
    .Input("lanes: num_lanes * resource")
    .Input("shards: num_values * resource")
    .Input("begin: int64")
    .Input("end: int64")
    .Output("keys: int64")
    .Output("last_steps: int32")
    .Output("counts: int32")
    .Output("values: Tvalues")
    .Attr("num_lanes: int >= 3")
    .Attr("num_values: int >= 1")
    .Attr("Tvalues: list(type) >= 1")
    .Attr("dims: list(int)")
    .Attr("table: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnknownShape)
    .Doc(R"doc(
Reads the keys of a range of buckets, with their rows.

lanes: One shard of the keys, of the last steps and of the counts.
shards: The same shard of the table and of each slot variable.
begin: First bucket in the shard.
end: Bucket after the last bucket.
keys: The keys of the buckets, [num_keys], sorted by row.
last_steps: Last step of each key.
counts: Count of each key.
values: Rows of the keys, [num_keys, dim], then the values of each slot
  variable, all from the same point in time.
dims: Number of columns of the table and of each slot variable.
table: Name of the table, for error messages.
)doc");

}  // namespace
}  // namespace layoutmap
