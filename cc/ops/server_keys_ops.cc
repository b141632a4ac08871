// Steps over parameter servers whose tables have open vocabularies.
// docs/ops.md has the contract in one table.

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
    .Input("token: int64")
    .Output("plan: variant")
    .Output("requests: num_servers * uint8")
    .Attr("num_inputs: int >= 1")
    .Attr("training: bool")
    .Attr("open_tables: list(int)")
    .Attr("key_kinds: list(int)")
    .Attr("has_unknown_row: list(bool)")
    .Attr("num_servers: int >= 1")
    .Attr("shard_servers: list(int)")
    .Attr("wire_dtype: {float, bfloat16} = DT_FLOAT") LM_ENGINE_CONFIG_ATTRS
    .SetIsStateful()  // Neither folded nor left out: it refuses bad ids.
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(SetShape(c, "plan", c->Scalar()));
      return SetVectors(c, "requests", "num_servers");
    })
    .Doc(R"doc(
Checks a batch and finds which keys of which server it needs.

ids: By feature: keys where the table is open, else rows.
splits, num_samples, weights: As of `EnqueueStep`.
token: As of `FoldGradients`.
plan: What `PlaceKeys` takes, on the same device.
requests: By server: epoch, number, attempt, and whether the step trains (8 bytes
  each); the type of values, as of `PlanStep`, the number of rows or keys of each
  shard there, and what its keys are made of (4 bytes each), zeros up to a
  multiple of 8 bytes; the keys of all shards (8 bytes each), each once, in the
  order of their first use; of each shard its rows, as of `PlanStep`, or how
  often each key is used, coded as differences of rows are.
training: Whether keys are counted, admitted and evicted.
open_tables: Which tables are open.
key_kinds: Of each, what its keys are made of: 1 integers, 2 strings.
has_unknown_row: Of each, whether keys without a row share the one after those
  of its vocabulary; else they are zeros.
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
Gives the keys of a batch the rows that the servers found.

plan: Of `PlanKeys`.
fetched: By server, of `FetchKeys`.
placed: What `CombineRows` and `FoldGradients` take.
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
Finds or makes the rows of keys, and reads rows, of all shards on a server.

Of a closure that has fetched here before, keys are only found.

shards: All shards on this server, by table, then by shard.
slots: Of each shard of an open table, one slot variable after the other.
state: Of each such shard: its keys, last steps and counts; its sketch and the
  sums of it where keys are admitted by their count; its numbers.
fetched_steps: Which steps' gradients are awaited, an int64 variable [6403] that
  starts as zeros.
applied: The int64 variable [2054] of `ApplyRows`.
request: Of `PlanKeys`.
fetched: A ticket for `ApplyRows` (8 bytes); the row of each key in its shard, or
  2^32 - 1 (4 bytes each), zeros up to a multiple of 8 bytes; the rows of all
  shards, each once, ascending, and the one that unknown keys share in any case.
tables, dims, dtypes: As of `FetchRows`.
open_pieces: Which shards are of open tables.
first_buckets: Of each, its first bucket; it has whole segments.
vocabulary_buckets: Of each, the buckets of the whole vocabulary.
has_unknown_row: Of each, whether it ends with the row of unknown keys, and they
  are trained.
optimizers: Of each, that of its table.
admissions, evictions, policies, first_values, first_limits, first_seeds: Of
  each, as of `EnqueueKeys`.
slot_values: Of each, what its slot variables start with.
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
Frees the rows of keys of one shard, or of all there whose time is over.

state: Of the shard, as of `FetchKeys`.
fetched_steps: As of `FetchKeys`: what an awaited step uses is refused.
keys: Those to free, any shape; those of other shards are left out, and with
  `expired` all.
evicted: The keys that had a row, [num_evicted].
only_check: Whether nothing is freed, only refused.
first_bucket, vocabulary_buckets: As of `FetchKeys`.
admission, evict, policy: As of `EvictKeys`.
)doc");

}  // namespace
}  // namespace layoutmap
