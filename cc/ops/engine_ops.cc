// Ops of the host engine. docs/ops.md documents the ops.

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

// The shape function of ops that look up a batch.
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
    .Attr("table_vocabulary_buckets: list(int) = []")
    .Attr("pipelined: bool = false")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc(R"doc(
Creates a host engine, which exists as long as there is a handle to it.

engine: Handle that the other ops accept.
num_replicas: Number of replicas that enqueue each step.
max_pending_steps: Maximum number of steps that a replica may enqueue ahead of
  its dequeues.
table_offsets: Offsets of all tables, one table after the other.
table_optimizers: Name of an optimizer for each table, or 'none'.
table_first_rows: First row of each table in its full table, for tables that are
  partitions of a larger one. An empty list means 0 for all tables.
table_vocabulary_buckets: For each table that is a shard of a table with an open
  vocabulary, the number of buckets of the full vocabulary, otherwise 0. An
  empty list means 0 for all tables.
feature_tables: Index into `table_names` of the table of each feature.
feature_max_sequence_lengths: Maximum sequence length of each feature; 0 if the
  feature is not a sequence.
table_num_buckets: Number of quantization levels to which the rows of each table
  are rounded when they are looked up; 0 disables rounding. An empty list means
  0 for all tables.
table_limits: Lowest and highest quantization level of each table.
table_dtypes: Storage type of the rows of each table. An empty list means float
  for all tables.
rounding_seed: Seed for the rounding of 16-bit rows. The rounding also depends
  on the table, the number of updates of the table, the row and the column.
out_of_range: Treatment of ids that are not rows of their table: 'error' raises
  an error, 'drop' ignores the id, 'clip' uses the nearest row.
pipelined: Whether each update waits until the next step has been looked up.
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
Checks a batch and appends it to the queue of a replica.

training: Whether gradients will follow. All replicas must pass the same value
  for a step.
ids: Global rows of each feature.
splits: row_splits [num_samples + 1], the indices [num_ids, 2] of a sparse
  tensor, or empty for dense ids.
num_samples: [num_features].
weights: One factor per id. An empty tensor means 1 for each id.
packed: Whether the ids of all features are in a single matrix `ids`, as
  returned by `LayoutMap>PackIds`. `weights` are then its `packed_weights` or an
  empty tensor, and `splits` are not used.
mark: Number that each row of a packed batch must begin with.
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
Looks up the oldest batch of a replica.

shards: All shards of the first table, then all shards of the second, and so on.
activations: For each feature, [num_samples, dim], or [num_samples,
  max_sequence_length, dim] if the feature is a sequence.
dims: Embedding dimension of the table of each feature.
max_sequence_lengths: Maximum sequence length of each feature; 0 if the feature
  is not a sequence.
)doc");

REGISTER_OP("LayoutMap>PrefetchStep")
    .Input("engine: resource")
    .Input("replica: int32")
    .Input("shards: num_shards * resource")
    .Attr("num_shards: int >= 1")
    .Attr("dims: list(int)")
    .Attr("max_sequence_lengths: list(int)")
    .SetIsStateful()
    .SetShapeFn(NoOutputs)
    .Doc(R"doc(
Looks up the batch that a replica of a pipelined engine dequeues next.

The next `DequeueStep` of the replica returns the result, unless a table has been
updated in the meantime. The op does nothing if no training step is enqueued, if
the replica has no dequeued step, or if an update is pending.

shards: All shards of the first table, then all shards of the second, and so on.
dims: Embedding dimension of the table of each feature.
max_sequence_lengths: Maximum sequence length of each feature; 0 if the feature
  is not a sequence.
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
Adds the gradients of a replica; the last replica's call updates the tables.

gradients: Gradients of the activations, with the same shapes.
hyperparameters: Hyperparameters of each table, in the order that its optimizer
  defines.
shards: All shards of the first table, then all shards of the second, and so on.
slots: Slot variables table by table; within a table, one slot variable after
  the other, shard by shard.
rounding_steps: For each table with 16-bit rows, the int64 variable that counts
  its updates.
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
Applies the pending update of a pipelined engine, if there is one.

shards: All shards of the first table, then all shards of the second, and so on.
slots: Slot variables table by table; within a table, one slot variable after
  the other, shard by shard.
rounding_steps: For each table with 16-bit rows, the int64 variable that counts
  its updates.
always: If False, the op applies the update only if the next step of the replica
  is forward-only, because such a step must see the update.
)doc");

REGISTER_OP("LayoutMap>PassStep")
    .Input("engine: resource")
    .Input("replica: int32")
    .SetIsStateful()
    .SetShapeFn(NoOutputs)
    .Doc(R"doc(
Dequeues the oldest batch of a replica without looking it up.

The op is for a replica in another process, which looks up the batch there.
)doc");

REGISTER_OP("LayoutMap>OpenStep")
    .Input("engine: resource")
    .Input("replica: int32")
    .Input("ids: num_features * Tids")
    .Input("splits: num_features * int64")
    .Input("num_samples: int64")
    .Input("weights: num_features * float")
    .Input("vocabulary_steps: int64")
    .Output("token: int64")
    .Attr("num_features: int >= 1")
    .Attr("Tids: {int32, int64}")
    .Attr("packed: bool = false")
    .Attr("mark: int = 0")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc(R"doc(
Checks a batch and stores it under a new token. No other call has to follow.

ids: Global rows of each feature.
splits: row_splits [num_samples + 1], the indices [num_ids, 2] of a sparse
  tensor, or empty for dense ids.
num_samples: [num_features].
weights: One factor per id. An empty tensor means 1 for each id.
vocabulary_steps: [num_tables], or empty if no ids are rows of keys. If the ids
  of a table are rows of keys that another op has looked up, the number of the
  vocabulary step in which it found them, otherwise 0. The rows that the
  vocabulary has used since this step are not evicted. The update of the lookup
  ends the lookup, so that the rows can be evicted.
token: Scalar that is larger than all earlier tokens of the replica.
packed: Whether the ids of all features are in a single matrix `ids`, as
  returned by `LayoutMap>PackIds`. `weights` are then its `packed_weights` or an
  empty tensor, and `splits` are not used.
mark: Number that each row of a packed batch must begin with.
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
Looks up the batch of a token. Otherwise the op works like `DequeueStep`.
)doc");

REGISTER_OP("LayoutMap>FollowStep")
    .Input("engine: resource")
    .Input("replica: int32")
    .Input("token: int64")
    .Input("gradients: num_features * float")
    .Input("coordinates: float")
    .Output("mark: float")
    .Attr("num_features: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      return SetShape(c, "mark", c->Matrix(64, 8));
    })
    .Doc(R"doc(
Stores the gradients of a token until they are applied or expire.

gradients: Gradients of the activations, with the same shapes.
coordinates: Coordinates of the gradients, or an empty vector if the op must
  compute them; see `GradientCoordinates`.
mark: Matrix that represents the gradients for `ApplyFollowed`. Its norm is the
  norm of the gradients. Marks may be summed and scaled like gradients.
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
Accepts the marks of a replica; the call of the last replica updates the tables.

marks: Sum of marks, [num_replicas * 64, 8]: the marks of the first replica, then
  the marks of the second replica, and so on. The gradients of each mark are
  multiplied by the factor of the mark in the sum and then applied. If other
  operations than sums and products with numbers were applied to the marks, the
  op fails and changes nothing.
hyperparameters: Hyperparameters of each table, in the order that its optimizer
  defines.
shards: All shards of the first table, then all shards of the second, and so on.
slots: Slot variables table by table; within a table, one slot variable after
  the other, shard by shard.
rounding_steps: For each table with 16-bit rows, the int64 variable that counts
  its updates.
)doc");

REGISTER_OP("LayoutMap>IssueMark")
    .Input("coordinates: float")
    .Output("mark: float")
    .Attr("numbers: list(int) >= 1")
    .SetShapeFn([](InferenceContext* c) {
      return SetShape(c, "mark", c->Matrix(64, 8));
    })
    .Doc(R"doc(
Returns a mark as `FollowStep`, for gradients that the program stores.

coordinates: Output of `GradientCoordinates`.
mark: Matrix that represents the last gradient of `numbers`.
numbers: Numbers of the earlier gradients of the lookup and of the gradient.
)doc");

REGISTER_OP("LayoutMap>ReadMarks")
    .Input("marks: float")
    .Input("issued: num_issued * float")
    .Output("factors: float")
    .Attr("num_issued: int >= 1")
    .Attr("numbers: list(int)")
    .Attr("where: string = ''")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int32_t num_issued;
      TF_RETURN_IF_ERROR(c->GetAttr("num_issued", &num_issued));
      return SetShape(c, "factors", c->Vector(num_issued));
    })
    .Doc(R"doc(
Computes the factors of marks in a sum of marks, as `ApplyFollowed`.

marks: Sum of marks, [64, 8].
issued: Outputs of `IssueMark`.
factors: Factor of each mark, or 0 if `marks` does not contain the mark.
numbers: Number of each mark.
where: Words that are appended to error messages.
)doc");

REGISTER_OP("LayoutMap>ReadOpenRows")
    .Input("engine: resource")
    .Input("token: int64")
    .Input("rows: int64")
    .Input("shards: num_shards * resource")
    .Input("offsets: int64")
    .Output("values: float")
    .Attr("num_shards: int >= 1")
    .Attr("placement: {'div', 'mod', 'offsets'}")
    .Attr("dim: int >= 1")
    .Attr("table: string = ''")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t dim;
      ShapeHandle rows, values;
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      TF_RETURN_IF_ERROR(GetShape(c, "rows", 1, &rows));
      TF_RETURN_IF_ERROR(c->Concatenate(rows, c->Vector(dim), &values));
      return SetShape(c, "values", values);
    })
    .Doc(R"doc(
Reads the rows of a lookup that `OpenRows` opened.

engine: Engine of the lookup. Only the gradient of this op uses it.
token: Token of the lookup. Only the gradient of this op uses it.
rows: Output `rows` of `OpenRows`.
shards: Variables; shard `s` has shape [shard size, dim].
offsets: Cumulative shard sizes, [num_shards + 1].
values: [num_rows, dim]; zeros for rows of -1.
placement: Assignment of rows to shards.
table: Name of the table, for error messages.
)doc");

REGISTER_OP("LayoutMap>MarkRows")
    .Input("engine: resource")
    .Input("token: int64")
    .Input("rows: int64")
    .Output("marked: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle rows;
      TF_RETURN_IF_ERROR(GetShape(c, "rows", 1, &rows));
      return SetShape(c, "marked", rows);
    })
    .Doc(R"doc(
Marks a lookup whose gradient is computed, for the next `RecordGradient`.

token: Token of a lookup that `OpenRows` opened. The op fails if the lookup has
  expired.
rows: Any rows.
marked: The same rows.
)doc");

REGISTER_OP("LayoutMap>RecordGradient")
    .Input("engine: resource")
    .Input("rows: int64")
    .Output("recorded: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle rows;
      TF_RETURN_IF_ERROR(GetShape(c, "rows", 1, &rows));
      return SetShape(c, "recorded", rows);
    })
    .Doc(R"doc(
Stores the rows of the gradient of all lookups that were marked before.

The rows of these lookups stay assigned to their keys until `ApplyRecorded`
applies the gradient, or the engine discards it.

rows: Rows of a sparse gradient; empty if the gradient is dense.
recorded: The same rows. `ApplyRecorded` identifies the gradient by the memory
  of this tensor.
)doc");

REGISTER_OP("LayoutMap>ApplyRecorded")
    .Input("engine: resource")
    .Input("replica: int32")
    .Input("rows: int64")
    .Input("gradients: float")
    .Input("hyperparameters: num_tables * float")
    .Input("shards: num_shards * resource")
    .Input("slots: num_slot_shards * resource")
    .Input("rounding_steps: num_half_tables * resource")
    .Attr("dense: bool")
    .Attr("num_tables: int >= 1")
    .Attr("num_shards: int >= 1")
    .Attr("num_slot_shards: int >= 0")
    .Attr("num_half_tables: int >= 0")
    .SetIsStateful()
    .SetShapeFn(NoOutputs)
    .Doc(R"doc(
Applies a gradient that was computed from recorded gradients to the table.

The op fails, and changes no row, if the gradient was already applied, or if its
lookups have expired, because their rows may then belong to other keys.

replica: 0, because the engine must have one replica.
rows: Rows of the gradient: an output of `RecordGradient`, or other rows if the
  caller has added, masked or sorted gradients.
gradients: [num_rows, dim]. The gradients of equal rows are summed in order.
hyperparameters: Hyperparameters of the table, in the order that its optimizer
  defines.
shards: All shards of the table.
slots: One slot variable after the other, shard by shard.
rounding_steps: Empty, because rows are float32.
dense: Whether `rows` are all rows of the table, and `gradients` is a dense
  gradient.
)doc");

REGISTER_OP("LayoutMap>ResetHostEngine")
    .Input("engine: resource")
    .SetIsStateful()
    .SetShapeFn(NoOutputs)
    .Doc("Discards all steps that are in progress.");

REGISTER_OP("LayoutMap>RetireHostEngine")
    .Input("engine: resource")
    .Input("why: string")
    .SetIsStateful()
    .SetShapeFn(NoOutputs)
    .Doc(R"doc(
Makes all later calls of an engine fail because another engine replaces it.

why: Error message of the later calls. An empty string allows calls again.
)doc");

REGISTER_OP("LayoutMap>WatchChanges")
    .Input("engine: resource")
    .Output("watch: int64")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc(R"doc(
Starts to record which rows of the engine's tables are written.

watch: Identifier to pass to `TakeChanges`. `TakeChanges` rejects all earlier
  identifiers from now on.
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
Copies all rows that were written since the last call, at one point in time.

watch: Identifier that `WatchChanges` returned.
also: For each table, additional rows to copy.
shards: All shards of the first table, then all shards of the second, and so on.
slots: Slot variables table by table; within a table, one slot variable after
  the other, shard by shard.
lanes: For each table with an open vocabulary, all shards of its keys, of the
  last steps of the keys and of the counts of the keys.
whole: Variables that are copied in full.
open_tables: Indices of the tables with an open vocabulary, ascending.
values: For each table, the rows that were written, ascending; then the values
  of these rows in the table and in each slot variable. If the table has an open
  vocabulary, the key, the last step and the count of each row follow; the row
  of unknown keys has the empty key. The variables `whole` come last.
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
Reports the state of the engine and of its steps.

pending: For each replica, the number of steps that wait for a dequeue.
awaiting: For each replica, whether a dequeued step waits for its gradients.
num_updates: Number of applied steps.
poisoned: Error that makes all calls fail until a reset, or an empty string.
held: Whether a pipelined update is pending.
feature_counts: For each feature, totals over all batches: samples, ids, dropped
  ids, clipped ids, and ids truncated after the last position of a sequence.
table_counts: For each table, totals over all training steps: lookups and unique
  rows.
num_open: For each replica, the number of lookups from `OpenStep` or `OpenRows`
  that gradients may follow.
num_followed: For each replica, the number of gradients from `FollowStep` or
  `RecordGradient` that wait for an update.
)doc");

}  // namespace
}  // namespace layoutmap
