// Ops for parameter server steps on tables with open vocabularies. docs/ops.md
// documents the ops.

#include "cc/ops/engine_attrs.h"
#include "cc/ops/ports.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace layoutmap {
namespace {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("LayoutMap>PlanKeys")
    .Input("ids: num_inputs * int64")
    .Input("splits: num_inputs * int64")
    .Input("num_samples: int64")
    .Input("weights: num_inputs * float")
    .Input("key_kinds: int32")
    .Input("token: int64")
    .Output("plan: variant")
    .Output("requests: num_servers * uint8")
    .Attr("num_inputs: int >= 1")
    .Attr("training: bool")
    .Attr("open_tables: list(int)")
    .Attr("has_unknown_row: list(bool)")
    .Attr("num_servers: int >= 1")
    .Attr("shard_servers: list(int)")
    .Attr("wire_dtype: {float, bfloat16} = DT_FLOAT") LM_ENGINE_CONFIG_ATTRS
    // The op rejects invalid ids, so grappler must not fold or prune it.
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(SetShape(c, "plan", c->Scalar()));
      return SetVectors(c, "requests", "num_servers");
    })
    .Doc(R"doc(
Checks a batch and finds which keys of each server it needs.

ids: For each feature, keys if its table has an open vocabulary, otherwise rows.
splits: As in `EnqueueStep`.
num_samples: As in `EnqueueStep`.
weights: As in `EnqueueStep`.
key_kinds: [num_open_tables]. For each open table, the kind of its keys in this
  step: 1 integers, 2 strings, 0 if the step has no keys.
token: As in `FoldGradients`.
plan: Plan that `PlaceKeys` accepts on the same device.
requests: For each server, first the epoch, number and attempt of the closure
  and whether the step trains (8 bytes each). Then the type of values, as in
  `PlanStep`, the number of rows or keys of each shard of the server, and the
  kind of its keys (4 bytes each), padded with zeros to a multiple of 8 bytes.
  Then the keys of all shards (8 bytes each), each key once, in the order of
  their first use. Last, for each shard, its rows, as in `PlanStep`, or the
  number of uses of each key, encoded like differences of rows.
training: Whether keys are counted, admitted and evicted.
open_tables: Indices of the tables with an open vocabulary.
has_unknown_row: For each open table, whether keys without a row share the row
  after the rows of the vocabulary. Otherwise their embeddings are zeros.
)doc");

REGISTER_OP("LayoutMap>PlaceKeys")
    .Input("plan: variant")
    .Input("fetched: num_servers * uint8")
    .Output("placed: variant")
    .Attr("num_servers: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      return SetShape(c, "placed", c->Scalar());
    })
    .Doc(R"doc(
Assigns the rows that the servers found to the keys of a batch.

plan: Output of `PlanKeys`.
fetched: For each server, the output of `FetchKeys`.
placed: Plan that `CombineRows` and `FoldGradients` accept.
)doc");

REGISTER_OP("LayoutMap>FetchKeys")
    .Input("shards: num_shards * resource")
    .Input("slots: num_slot_shards * resource")
    .Input("state: num_state * resource")
    .Input("fetched_steps: resource")
    .Input("applied: resource")
    .Input("request: uint8")
    .Output("fetched: uint8")
    .Attr("num_shards: int >= 1")
    .Attr("num_slot_shards: int >= 0")
    .Attr("num_state: int >= 0")
    .Attr("tables: list(string)")
    .Attr("dims: list(int)")
    .Attr("dtypes: list({float, bfloat16, half})")
    .Attr("open_pieces: list(int)")
    .Attr("first_buckets: list(int)")
    .Attr("vocabulary_buckets: list(int)")
    .Attr("has_unknown_row: list(bool)")
    .Attr("optimizers: list(string)")
    .Attr("admissions: list(string)")
    .Attr("evictions: list(string)")
    .Attr("policies: list(int)")
    .Attr("first_values: list(string)")
    .Attr("first_limits: list(float)")
    .Attr("first_seeds: list(int)")
    .Attr("slot_values: list(float)")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      return SetShape(c, "fetched", c->Vector(InferenceContext::kUnknownDim));
    })
    .Doc(R"doc(
Finds or creates the rows of keys, and reads rows, of all shards on a server.

If the closure has already fetched here, the op only finds keys.

shards: All shards on this server, by table, then by shard.
slots: For each shard of an open table, one slot variable after the other.
state: For each such shard, its keys, their last steps and their counts; its
  sketch and the sums of the sketch if keys are admitted by their count; its
  numbers.
fetched_steps: Record of the steps whose gradients are pending: an int64
  variable [6403] with zeros as initial values.
applied: The int64 variable [2054] of `ApplyRows`.
request: Output of `PlanKeys`.
fetched: A ticket for `ApplyRows` (8 bytes). Then the row of each key in its
  shard, or 2^32 - 1 if the key has no row (4 bytes each), padded with zeros to
  a multiple of 8 bytes. Then the rows of all shards, each once, ascending; the
  row that unknown keys share is always included.
tables: As in `FetchRows`.
dims: As in `FetchRows`.
dtypes: As in `FetchRows`.
open_pieces: Indices of the shards that belong to open tables.
first_buckets: First bucket of each such shard. A shard consists of complete
  segments.
vocabulary_buckets: For each such shard, the number of buckets of the full
  vocabulary.
has_unknown_row: For each such shard, whether its last row is the row of unknown
  keys, which are then trained.
optimizers: For each such shard, the optimizer of its table.
admissions: For each such shard, as in `EnqueueKeys`.
evictions: For each such shard, as in `EnqueueKeys`.
policies: For each such shard, as in `EnqueueKeys`.
first_values: For each such shard, as in `EnqueueKeys`.
first_limits: For each such shard, as in `EnqueueKeys`.
first_seeds: For each such shard, as in `EnqueueKeys`.
slot_values: For each such shard, the initial values of its slot variables.
)doc");

REGISTER_OP("LayoutMap>EvictServerKeys")
    .Input("state: num_state * resource")
    .Input("fetched_steps: resource")
    .Input("keys: int64")
    .Output("evicted: int64")
    .Attr("num_state: int >= 4")
    .Attr("table: string")
    .Attr("first_bucket: int >= 0")
    .Attr("vocabulary_buckets: int >= 1")
    .Attr("admission: {'all', 'count', 'probability'}")
    .Attr("evict: {'none', 'lru', 'lfu'}")
    .Attr("policy: list(int)")
    .Attr("expired: bool")
    .Attr("only_check: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      return SetShape(c, "evicted", c->Vector(InferenceContext::kUnknownDim));
    })
    .Doc(R"doc(
Frees the rows of the given keys, or of all expired keys, of one shard.

state: State of the shard, as in `FetchKeys`.
fetched_steps: As in `FetchKeys`. The op fails if a pending step uses one of the
  keys.
keys: Keys to free, any shape. Keys of other shards are ignored, and with
  `expired` all keys are ignored.
evicted: Keys that had a row, [num_evicted].
only_check: If True, the op only checks whether the keys may be freed.
first_bucket: As in `FetchKeys`.
vocabulary_buckets: As in `FetchKeys`.
admission: As in `EvictKeys`.
evict: As in `EvictKeys`.
policy: As in `EvictKeys`.
)doc");

}  // namespace
}  // namespace layoutmap
