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
token: [3] as in `FoldGradients`, or [4] with the index of the lookup among the
  training lookups of a step. Without a closure, the attempt in the request of a
  lookup after the first one must be the ticket of the step.
plan: Plan that `PlaceKeys` accepts on the same device.
requests: For each server, first the epoch, number and attempt of the closure
  and 0 for a forward-only step, otherwise 1 plus the index of the lookup (8
  bytes each). Then the type of values, as in
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
    .Input("server: resource")
    .Input("request: uint8")
    .Output("fetched: uint8")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      return SetShape(c, "fetched", c->Vector(InferenceContext::kUnknownDim));
    })
    .Doc(R"doc(
Finds or creates the rows of keys, and reads rows, of all shards on a server.

If the closure has already fetched here, the op only finds keys.

server: Output of `CreateServer`, with the input `fetched_steps`.
request: Output of `PlanKeys`.
fetched: A ticket for `ApplyRows` (8 bytes). Then the row of each key in its
  shard, or 2^32 - 1 if the key has no row (4 bytes each), padded with zeros to
  a multiple of 8 bytes. Then the rows of all shards, each once, ascending; the
  row that unknown keys share is always included.
)doc");

REGISTER_OP("LayoutMap>JoinKeys")
    .Input("plan: variant")
    .Input("lookups: num_lookups * variant")
    .Input("fetched: num_fetched * uint8")
    .Output("placed: variant")
    .Output("joined: num_servers * uint8")
    .Attr("num_lookups: int >= 1")
    .Attr("num_fetched: int >= 1")
    .Attr("num_servers: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(SetShape(c, "placed", c->Scalar()));
      return SetVectors(c, "joined", "num_servers");
    })
    .Doc(R"doc(
Assigns rows to the keys of a batch that consists of several lookups of a step.

plan: Output `plan` of `PlanKeys` for the joined batch: for each feature, the
  samples of the first lookup, then the samples of the second lookup, and so on.
lookups: Output `plan` of `PlanKeys` for each lookup.
fetched: Outputs of `FetchKeys`: for each lookup, one tensor per server.
placed: Plan that `FoldGradients` accepts. Each key has the row that it had in
  its lookup.
joined: Input `fetched` of `FoldGradients`: the ticket of the step, followed by
  zeros instead of rows.
)doc");

REGISTER_OP("LayoutMap>EvictServerKeys")
    .Input("server: resource")
    .Input("keys: int64")
    .Output("evicted: int64")
    .Attr("piece: int >= 0")
    .Attr("expired: bool")
    .Attr("only_check: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      return SetShape(c, "evicted", c->Vector(InferenceContext::kUnknownDim));
    })
    .Doc(R"doc(
Frees the rows of the given keys, or of all expired keys, of one shard.

If other shards share the vocabulary, the rows are freed in all of them.

server: Output of `CreateServer`. The op fails if a pending step uses one of the
  keys.
keys: Keys to free, any shape. Keys of other shards are ignored, and with
  `expired` all keys are ignored.
evicted: Keys that had a row, [num_evicted].
piece: Index of the shard among the shards of the server. Its table must own an
  open vocabulary.
expired: Whether the op frees the rows of all expired keys.
only_check: If True, the op only checks whether the keys may be freed.
)doc");

}  // namespace
}  // namespace layoutmap
