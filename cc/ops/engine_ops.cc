// The host engine's ops. docs/ops.md has the contract in one table.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "cc/ops/engine_attrs.h"
#include "cc/ops/ports.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace layoutmap {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::NoOutputs;
using tensorflow::shape_inference::ScalarShape;
using tensorflow::shape_inference::ShapeHandle;

// Of what looks a batch up.
absl::Status ActivationShapes(InferenceContext* c) {
  std::vector<int64_t> dims, lengths;
  TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
  TF_RETURN_IF_ERROR(c->GetAttr("max_sequence_lengths", &lengths));
  return SetActivationShapes(c, dims, lengths);
}

REGISTER_OP("LayoutMap>CreateHostEngine")
    .Output("engine: resource")
    .Attr("num_replicas: int >= 1")
    .Attr("max_pending_steps: int >= 1 = 4") LM_ENGINE_CONFIG_ATTRS
    .Attr("table_first_rows: list(int) = []")
    .Attr("pipelined: bool = false")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc(R"doc(
Makes a host engine, which lives as long as a handle to it does.

engine: What the other ops take.
num_replicas: How many replicas enqueue each step.
max_pending_steps: Steps a replica may enqueue ahead of its dequeues.
table_offsets: The offsets of all tables, one table after the other.
table_optimizers: none, or the name of a rule, one per table.
table_first_rows: Of parts of tables, where each begins in the whole; none: 0.
feature_tables: For each feature the place of its table in `table_names`.
feature_max_sequence_lengths: 0 for a feature that is not a sequence.
table_num_buckets: By table, to how many values rows are rounded when they are
  looked up; 0 for rows as they are. Empty: 0 for all.
table_limits: By table, the lowest and the highest of these values.
table_dtypes: By table, how its rows are stored. Empty: float for all.
rounding_seed: What the rounding of 16-bit rows depends on, besides the table,
  the number of its updates, the row and the column.
out_of_range: What becomes of ids that are no row: an error, nothing (they are
  dropped), or the nearest row.
pipelined: Whether each update waits until the next step is looked up.
)doc");

REGISTER_OP("LayoutMap>EnqueueStep")
    .Input("engine: resource")
    .Input("replica: int32")
    .Input("training: bool")
    .Input("ids: num_features * Tids")
    .Input("splits: num_features * int64")
    .Input("num_samples: int64")
    .Input("weights: num_features * float")
    .Attr("num_features: int >= 1")
    .Attr("Tids: {int32, int64}")
    .Attr("packed: bool = false")
    .Attr("mark: int = 0")
    .SetIsStateful()
    .SetShapeFn(NoOutputs)
    .Doc(R"doc(
Checks a batch and puts it at the end of the replica's queue.

training: Whether gradients will follow; the same for all replicas of a step.
ids: Global rows of each feature.
splits: row_splits [num_samples + 1], or the indices [num_ids, 2] of a sparse
  tensor, or empty for dense ids.
num_samples: [num_features].
weights: One factor per id, or none for 1 each.
packed: Whether all features are in one matrix `ids`, as `LayoutMap>PackIds`
  makes it. `weights` are its or none, `splits` are not used.
mark: What a packed batch must have before the features of each sample.
)doc");

REGISTER_OP("LayoutMap>DequeueStep")
    .Input("engine: resource")
    .Input("replica: int32")
    .Input("shards: num_shards * resource")
    .Output("activations: num_features * float")
    .Attr("num_shards: int >= 1")
    .Attr("num_features: int >= 1")
    .Attr("dims: list(int)")
    .Attr("max_sequence_lengths: list(int)")
    .SetIsStateful()
    .SetShapeFn(ActivationShapes)
    .Doc(R"doc(
Looks up the replica's oldest batch.

shards: All shards of the first table, then those of the second, and so on.
activations: By feature, [num_samples, dim], or
  [num_samples, max_sequence_length, dim] for a sequence feature.
dims: The dim of each feature's table.
max_sequence_lengths: Of each feature, 0 for none.
)doc");

REGISTER_OP("LayoutMap>ApplyStep")
    .Input("engine: resource")
    .Input("replica: int32")
    .Input("gradients: num_features * float")
    .Input("hyperparameters: num_tables * float")
    .Input("shards: num_shards * resource")
    .Input("slots: num_slot_shards * resource")
    .Input("rounding_steps: num_half_tables * resource")
    .Attr("num_features: int >= 1")
    .Attr("num_tables: int >= 1")
    .Attr("num_shards: int >= 1")
    .Attr("num_slot_shards: int >= 0")
    .Attr("num_half_tables: int >= 0")
    .SetIsStateful()
    .SetShapeFn(NoOutputs)
    .Doc(R"doc(
Hands in a replica's gradients; with the last replica's, updates the tables.

gradients: Shaped like the activations.
hyperparameters: By table, as its optimizer orders them.
shards: All shards of the first table, then those of the second, and so on.
slots: Table by table, one slot variable after the other, shard by shard.
rounding_steps: Of each table with 16-bit rows, the int64 that counts its
  updates.
)doc");

REGISTER_OP("LayoutMap>LandUpdate")
    .Input("engine: resource")
    .Input("replica: int32")
    .Input("shards: num_shards * resource")
    .Input("slots: num_slot_shards * resource")
    .Input("rounding_steps: num_half_tables * resource")
    .Attr("num_shards: int >= 1")
    .Attr("num_slot_shards: int >= 0")
    .Attr("num_half_tables: int >= 0")
    .Attr("always: bool")
    .SetIsStateful()
    .SetShapeFn(NoOutputs)
    .Doc(R"doc(
Lands the update that a pipelined engine holds back, if there is one.

shards: All shards of the first table, then those of the second, and so on.
slots: Table by table, one slot variable after the other, shard by shard.
rounding_steps: Of each table with 16-bit rows, the int64 that counts its
  updates.
always: False: only if the replica's next step is forward-only, which must see
  the update.
)doc");

REGISTER_OP("LayoutMap>PassStep")
    .Input("engine: resource")
    .Input("replica: int32")
    .SetIsStateful()
    .SetShapeFn(NoOutputs)
    .Doc(R"doc(
Dequeues the replica's oldest batch without looking it up.

Of a replica in another process, which looks it up there.
)doc");

REGISTER_OP("LayoutMap>OpenStep")
    .Input("engine: resource")
    .Input("replica: int32")
    .Input("ids: num_features * Tids")
    .Input("splits: num_features * int64")
    .Input("num_samples: int64")
    .Input("weights: num_features * float")
    .Output("token: int64")
    .Attr("num_features: int >= 1")
    .Attr("Tids: {int32, int64}")
    .Attr("packed: bool = false")
    .Attr("mark: int = 0")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc(R"doc(
Checks a batch and keeps it under a new token. Nothing has to follow.

ids: Global rows of each feature.
splits: row_splits [num_samples + 1], or the indices [num_ids, 2] of a sparse
  tensor, or empty for dense ids.
num_samples: [num_features].
weights: One factor per id, or none for 1 each.
token: [], larger than those of the replica before it.
packed: Whether all features are in one matrix `ids`, as `LayoutMap>PackIds`
  makes it. `weights` are its or none, `splits` are not used.
mark: What a packed batch must have before the features of each sample.
)doc");

REGISTER_OP("LayoutMap>LookUpStep")
    .Input("engine: resource")
    .Input("replica: int32")
    .Input("token: int64")
    .Input("shards: num_shards * resource")
    .Output("activations: num_features * float")
    .Attr("num_shards: int >= 1")
    .Attr("num_features: int >= 1")
    .Attr("dims: list(int)")
    .Attr("max_sequence_lengths: list(int)")
    .SetIsStateful()
    .SetShapeFn(ActivationShapes)
    .Doc(R"doc(
Looks up the batch of a token; as `DequeueStep` otherwise.
)doc");

REGISTER_OP("LayoutMap>FollowStep")
    .Input("engine: resource")
    .Input("replica: int32")
    .Input("token: int64")
    .Input("gradients: num_features * float")
    .Output("mark: float")
    .Attr("num_features: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      return SetShape(c, "mark", c->Matrix(64, 2));
    })
    .Doc(R"doc(
Keeps gradients of a token until they are applied, or expire.

gradients: Shaped like the activations.
mark: What `ApplyFollowed` knows them by. Marks may be added up and scaled as
  gradients are.
)doc");

REGISTER_OP("LayoutMap>ApplyFollowed")
    .Input("engine: resource")
    .Input("replica: int32")
    .Input("marks: float")
    .Input("hyperparameters: num_tables * float")
    .Input("shards: num_shards * resource")
    .Input("slots: num_slot_shards * resource")
    .Input("rounding_steps: num_half_tables * resource")
    .Attr("num_tables: int >= 1")
    .Attr("num_shards: int >= 1")
    .Attr("num_slot_shards: int >= 0")
    .Attr("num_half_tables: int >= 0")
    .SetIsStateful()
    .SetShapeFn(NoOutputs)
    .Doc(R"doc(
Takes a replica's marks; with the last replica's, updates the tables.

marks: [64, 2], a sum of marks: the gradients of each are applied times its
  factor in the sum. Zeros are no gradients.
hyperparameters: By table, as its optimizer orders them.
shards: All shards of the first table, then those of the second, and so on.
slots: Table by table, one slot variable after the other, shard by shard.
rounding_steps: Of each table with 16-bit rows, the int64 that counts its
  updates.
)doc");

REGISTER_OP("LayoutMap>ResetHostEngine")
    .Input("engine: resource")
    .SetIsStateful()
    .SetShapeFn(NoOutputs)
    .Doc("Forgets every step in flight.");

REGISTER_OP("LayoutMap>RetireHostEngine")
    .Input("engine: resource")
    .Input("why: string")
    .SetIsStateful()
    .SetShapeFn(NoOutputs)
    .Doc(R"doc(
Refuses every later call of an engine, whose place another one takes.

why: The message; an empty one allows calls again.
)doc");

REGISTER_OP("LayoutMap>WatchChanges")
    .Input("engine: resource")
    .Output("watch: int64")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc(R"doc(
Begins to note which rows of the engine's tables are written.

watch: What `TakeChanges` asks for; an earlier one is refused from now on.
)doc");

REGISTER_OP("LayoutMap>TakeChanges")
    .Input("engine: resource")
    .Input("watch: int64")
    .Input("also: num_tables * int64")
    .Input("shards: num_shards * resource")
    .Input("slots: num_slot_shards * resource")
    .Input("lanes: num_lane_shards * resource")
    .Input("whole: num_whole * resource")
    .Output("values: Tvalues")
    .Attr("num_tables: int >= 1")
    .Attr("num_shards: int >= 1")
    .Attr("num_slot_shards: int >= 0")
    .Attr("num_lane_shards: int >= 0")
    .Attr("num_whole: int >= 0")
    .Attr("open_tables: list(int)")
    .Attr("Tvalues: list(type) >= 1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnknownShape)
    .Doc(R"doc(
Copies the rows that were written since the last call, all at one moment.

watch: As of `WatchChanges`.
also: By table, rows that are to be copied besides.
shards: All shards of the first table, then those of the second, and so on.
slots: Table by table, one slot variable after the other, shard by shard.
lanes: Of each open table, all shards of its keys, of their last steps and of
  their counts.
whole: Variables that are copied as they are.
open_tables: Which tables of the engine are open, ascending.
values: By table: the rows that were written, ascending; these rows of the
  table, and of each slot variable; if it is open, the key, the last step and
  the count of each, an empty key for the row of unknown ones. Then the whole
  variables.
)doc");

REGISTER_OP("LayoutMap>DescribeHostEngine")
    .Input("engine: resource")
    .Output("pending: int64")
    .Output("awaiting: bool")
    .Output("num_updates: int64")
    .Output("poisoned: string")
    .Output("held: bool")
    .Output("feature_counts: int64")
    .Output("table_counts: int64")
    .Output("num_open: int64")
    .Output("num_followed: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      constexpr auto kUnknown = InferenceContext::kUnknownDim;
      for (const char* by_replica :
           {"pending", "awaiting", "num_open", "num_followed"}) {
        TF_RETURN_IF_ERROR(SetShape(c, by_replica, c->Vector(kUnknown)));
      }
      for (const char* scalar : {"num_updates", "poisoned", "held"}) {
        TF_RETURN_IF_ERROR(SetShape(c, scalar, c->Scalar()));
      }
      TF_RETURN_IF_ERROR(SetShape(c, "feature_counts", c->Matrix(kUnknown, 5)));
      return SetShape(c, "table_counts", c->Matrix(kUnknown, 2));
    })
    .Doc(R"doc(
Tells where the engine's steps are.

pending: By replica, steps that wait for a dequeue.
awaiting: By replica, whether a dequeued step waits for its gradients.
num_updates: Steps that were applied.
poisoned: Why everything is refused until a reset, or empty.
held: Whether an update waits to land.
feature_counts: By feature, of all batches: samples, ids, and of these ids those
  dropped, clipped, and cut off behind the last position of a sequence.
table_counts: By table, of all training steps: lookups, and unique rows.
num_open: By replica, lookups of `OpenStep` that gradients may follow.
num_followed: By replica, gradients of `FollowStep` that wait for an update.
)doc");

}  // namespace
}  // namespace layoutmap
