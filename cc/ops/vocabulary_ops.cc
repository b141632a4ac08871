// Ops for open vocabularies. docs/ops.md documents the ops.

#include "absl/status/status.h"
#include "cc/ops/ports.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace layoutmap {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("LayoutMap>FindKeys")
    .Input("shards: num_shards * resource")
    .Input("offsets: int64")
    .Input("keys: int64")
    .Output("rows: int64")
    .Attr("num_shards: int >= 1")
    .Attr("table: string = ''")
    .Attr("first_bucket: int = 0")
    .Attr("vocabulary_buckets: int = 0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle keys;
      TF_RETURN_IF_ERROR(GetShape(c, "keys", &keys));
      return SetShape(c, "rows", keys);
    })
    .Doc(R"doc(
Finds the rows of keys in an open vocabulary without changing the vocabulary.

shards: Keys of the vocabulary; shard `s` has shape [buckets of the shard, 8].
offsets: Cumulative numbers of buckets, [num_shards + 1].
keys: Any shape.
rows: Row of each key, or -1 if the key has no row.
table: Name of the table, for error messages.
first_bucket: If `shards` is one shard of a vocabulary, the index of its first
  bucket.
vocabulary_buckets: If `shards` is one shard of a vocabulary, the number of
  buckets of the vocabulary, otherwise 0. Keys of other shards have no row, and
  rows are rows of the full table.
)doc");

REGISTER_OP("LayoutMap>EvictKeys")
    .Input("engine: resource")
    .Input("state: num_state * resource")
    .Input("shards: num_shards * resource")
    .Input("slots: num_slot_shards * resource")
    .Input("keys: int64")
    .Output("evicted: int64")
    .Output("values: Tvalues")
    .Attr("num_state: int >= 4")
    .Attr("num_shards: int >= 1")
    .Attr("num_slot_shards: int >= 0")
    .Attr("Tvalues: list(type) >= 1")
    .Attr("table: int")
    .Attr("sharing: list(int) = []")
    .Attr("admission: {'all', 'count', 'probability'}")
    .Attr("evict: {'none', 'lru', 'lfu'}")
    .Attr("policy: list(int)")
    .Attr("expired: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(tensorflow::shape_inference::UnknownShape(c));
      return SetShape(c, "evicted", c->Vector(InferenceContext::kUnknownDim));
    })
    .Doc(R"doc(
Frees the rows of the given keys, or of all expired keys.

state: Variables of the vocabulary: all shards of its keys, of their last steps
  and of their counts; its sketch and the sums of the sketch if keys are
  admitted by their count; its numbers.
shards: All shards of the table, then of each table in `sharing`.
slots: One slot variable after the other, shard by shard, for the same tables.
keys: Keys to free, any shape; unused with `expired`. The op fails if a step in
  flight uses the row of one of the keys.
evicted: Keys that had a row, [num_evicted].
values: Values of their rows, [num_evicted, dim], then of each slot variable,
  then the same for each table in `sharing`.
policy: min_count, admission probability times 2^32, half_life_steps, ttl_steps,
  fails_when_full, seed.
table: Index of the table in the engine.
sharing: Indices of the other tables that use the same vocabulary.
)doc");

REGISTER_OP("LayoutMap>FirstRows")
    .Input("keys: int64")
    .Output("rows: float")
    .Attr("kind: {'constant', 'uniform', 'normal', 'truncated_normal'}")
    .Attr("limits: list(float)")
    .Attr("seed: int")
    .Attr("dim: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle keys, rows;
      int64_t dim;
      TF_RETURN_IF_ERROR(GetShape(c, "keys", &keys));
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      TF_RETURN_IF_ERROR(c->Concatenate(keys, c->Vector(dim), &rows));
      return SetShape(c, "rows", rows);
    })
    .Doc(R"doc(
Computes the initial values of the rows of keys.

keys: Any shape.
rows: [*keys.shape, dim]. A value depends only on the seed, the key and the
  column.
limits: Two numbers: the constant and an unused number, the lower and upper
  limit, or the mean and the standard deviation.
seed: Seed of the vocabulary and the table.
)doc");

// The inputs, attributes and outputs of ops that accept batches of keys and
// report evicted keys. The kernels are in
// cc/kernels/vocabulary/engine_keys_kernels.cc.
#define LM_KEYS_PORTS                       \
  .Input("ids: num_inputs * int64")         \
      .Input("splits: num_inputs * int64")  \
      .Input("num_samples: int64")          \
      .Input("weights: num_inputs * float") \
      .Attr("num_inputs: int >= 1") LM_OPEN_TABLE_PORTS

// The inputs, attributes and outputs about open tables.
#define LM_OPEN_TABLE_PORTS                       \
  .Input("key_kinds: int32")                      \
      .Input("state: num_state * resource")       \
      .Input("shards: num_shards * resource")     \
      .Input("slots: num_slot_shards * resource") \
      .Attr("num_state: int >= 4")                \
      .Attr("num_shards: int >= 1")               \
      .Attr("num_slot_shards: int >= 0")          \
      .Attr("open_tables: list(int)")             \
      .Attr("vocabulary_of: list(int) = []")      \
      .Attr("has_unknown_row: list(bool)")        \
      .Attr("admissions: list(string)")           \
      .Attr("evictions: list(string)")            \
      .Attr("policies: list(int)")                \
      .Attr("first_values: list(string)")         \
      .Attr("first_limits: list(float)")          \
      .Attr("first_seeds: list(int)")             \
      .Attr("slot_values: list(float)")           \
      .Attr("telling: list(int)")                 \
      .Attr("Tevicted: list(type) >= 0")          \
      .Output("evicted: Tevicted")                \
      .SetIsStateful()

REGISTER_OP("LayoutMap>EnqueueKeys")
    .Input("engine: resource")
    .Input("training: bool") LM_KEYS_PORTS
    .SetShapeFn(tensorflow::shape_inference::UnknownShape)
    .Doc(R"doc(
Checks all replicas' batches, assigns rows to new keys and enqueues a step.

training: Whether gradients will follow. Keys are counted, admitted and evicted
  only in this case.
ids: By replica, then by feature: keys if the table has an open vocabulary,
  otherwise rows.
splits: As in `EnqueueStep`.
num_samples: [num_replicas * num_features].
weights: One factor per id. An empty tensor means 1 for each id.
key_kinds: [num_open_tables]. For each open table, the kind of its keys in this
  step: 1 integers, 2 strings, 0 if the step has no keys.
state: For each open table that owns a vocabulary, the variables of the
  vocabulary, as in `EvictKeys`.
shards: All shards of the first open table, then all shards of the second, and
  so on.
slots: Shards of each slot variable, in the same order.
open_tables: Indices of the tables with an open vocabulary.
vocabulary_of: For each open table, the table whose vocabulary it uses, as an
  index into `open_tables`. An empty list: each table owns a vocabulary. If
  several tables use a vocabulary, a key counts as often as in the table in
  which it occurs most often.
has_unknown_row: For each open table, whether keys without a row share the row
  after the rows of the vocabulary. Otherwise their embeddings are zeros.
policies: For each open table, six numbers, as in `EvictKeys`.
first_values: For each open table, the distribution of initial values, as in
  `FirstRows`.
first_limits: For each open table, the two numbers of the distribution.
first_seeds: For each open table, the seed of the distribution.
slot_values: For each open table, the initial values of its slot variables.
telling: Tables whose evicted keys are reported, as indices into `open_tables`.
evicted: For each of these tables, the keys whose rows were assigned to other
  keys, [num_evicted] int64; the previous values of their rows, [num_evicted,
  dim]; and the values of each slot variable.
)doc");

REGISTER_OP("LayoutMap>OpenKeys")
    .Input("engine: resource")
    .Input("replica: int32")
    .Output("token: int64") LM_KEYS_PORTS
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(tensorflow::shape_inference::UnknownShape(c));
      return SetShape(c, "token", c->Scalar());
    })
    .Doc(R"doc(
Opens a lookup of keys and assigns rows to new keys; see `OpenStep`.

ids: Keys or rows by feature. All other inputs are as in `EnqueueKeys`.
token: Token of the lookup.
)doc");

REGISTER_OP("LayoutMap>OpenRows")
    .Input("engine: resource")
    .Output("token: int64")
    .Output("rows: int64") LM_KEYS_PORTS
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(tensorflow::shape_inference::UnknownShape(c));
      TF_RETURN_IF_ERROR(SetShape(c, "token", c->Scalar()));
      return SetShape(c, "rows", c->Vector(InferenceContext::kUnknownDim));
    })
    .Doc(R"doc(
Opens a lookup of keys whose gradients the caller holds; assigns rows to keys.

The engine must have one replica and one feature.

ids: Keys; a sample must have at most one key. All other inputs are as in
  `EnqueueKeys`.
token: Token of the lookup, for `MarkRows`.
rows: Row of each sample, or -1 if the sample has no key or its key no row. The
  rows stay assigned to their keys until the gradient of the lookup is applied
  or discarded.
)doc");

REGISTER_OP("LayoutMap>AdmitRequests")
    .Input("engine: resource")
    .Input("training: bool")
    .Input("requests: num_requests * uint32")
    .Output("rows: num_requests * uint32")
    .Output("error: string")
    .Output("steps: int64") LM_OPEN_TABLE_PORTS.Attr("num_requests: int >= 1")
    .Attr("request_tables: list(int)")
    .Attr("keeps_change: bool")
    .Attr("num_earlier: int = 0")
    .SetShapeFn(tensorflow::shape_inference::UnknownShape)
    .Doc(R"doc(
Finds the rows of requested keys, and assigns rows to new keys.

The tables of the engine are shards, and the op runs no step of the engine.
Steps in flight pin the rows of their batches, or of their vocabulary steps; see
`OpenStep`.

training: Whether keys are counted, admitted and evicted.
requests: For each replica, the keys of its batch that belong to the shards, in
  the format of `requests` of `RequestKeys`. The keys of a table are admitted in
  the order feature, replica, position.
request_tables: For each feature in a request, its table, as an index into
  `open_tables`, or -1 if the engine has no shard of the table.
rows: For each replica, the row in the shard of each key of its request, or
  2^32 - 1 if the key has no row.
error: Error message, or an empty string. If there is an error, no vocabulary
  has changed, and `rows` and `evicted` are empty. The op does not fail, because
  the other processes would then wait for this one.
steps: For each feature in a request, the number of the vocabulary step. 0 if
  the engine has no shard of the table, if `training` is false, or if there is
  an error.
has_unknown_row: Not used.
keeps_change: Whether `TakeBackKeys` can undo the op even if no evicted keys are
  reported.
num_earlier: Number of preceding calls of the op for the same step, whose rows
  are not evicted. `TakeBackKeys` undoes all of these calls.
)doc");

REGISTER_OP("LayoutMap>TakeBackKeys")
    .Input("engine: resource")
    .Input("why: string")
    .Input("state: num_state * resource")
    .Input("shards: num_shards * resource")
    .Input("slots: num_slot_shards * resource")
    .Attr("num_state: int >= 4")
    .Attr("num_shards: int >= 1")
    .Attr("num_slot_shards: int >= 0")
    .Attr("raises: bool")
    .Attr("in_processes: bool = false")
    .Attr("may_be_missing: bool = false")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Undoes the last op that admitted or evicted keys.

A program calls the op if it failed to process the keys that were evicted. The
step is removed from the engine, and the keys get their rows and values back.
The op fails if another call has used the step or changed a vocabulary since.

why: Message of the failure. With an empty string, the op only discards the
  information that is required for undoing.
state: As in the op that is undone, like `shards` and `slots`.
raises: Whether the op fails with the message `why` after the undo.
in_processes: Whether other processes have the step, too. In this case the step
  stays in the engine, and all later calls of the engine fail until it is reset.
may_be_missing: If there is no change to undo, the op does nothing (true) or
  fails (false).
)doc");

#undef LM_KEYS_PORTS
#undef LM_OPEN_TABLE_PORTS

}  // namespace
}  // namespace layoutmap
