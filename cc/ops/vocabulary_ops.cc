// Open vocabularies. docs/ops.md has the contract in one table.

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
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle keys;
      TF_RETURN_IF_ERROR(GetShape(c, "keys", &keys));
      return SetShape(c, "rows", keys);
    })
    .Doc(R"doc(
Finds the rows of keys in an open vocabulary, which it does not change.

shards: The vocabulary's keys, shard `s` of shape [buckets of the shard, 8].
offsets: Cumulative numbers of buckets, [num_shards + 1].
keys: Any shape.
rows: The row of each key, or -1.
table: For messages.
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
Frees the rows of keys, or of all keys whose time is over.

state: Variables of the vocabulary: all shards of its keys, of their last steps
  and of their counts; its sketch and the sums of it where keys are admitted by
  their count; its numbers.
shards: All shards of the table.
slots: One slot variable after the other, shard by shard.
keys: Those to free, any shape; unused with `expired`. One whose row a step in
  flight uses is refused.
evicted: The keys that had a row, [num_evicted].
values: What their rows held, [num_evicted, dim], then each slot variable.
policy: min_count, admitted of 2^32, half_life_steps, ttl_steps,
  fails_when_full, seed.
table: Its number in the engine.
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
Computes the values that the rows of keys start with.

keys: Any shape.
rows: [*keys.shape, dim], a function of seed, key and column alone.
limits: The constant and nothing, the limits, or mean and standard deviation.
seed: That of the vocabulary and the table.
)doc");

// What an op that takes batches of keys takes (cc/kernels/vocabulary/
// engine_keys_kernels.cc), and tells of the keys that went.
#define LM_KEYS_PORTS                             \
  .Input("ids: num_inputs * int64")               \
      .Input("splits: num_inputs * int64")        \
      .Input("num_samples: int64")                \
      .Input("weights: num_inputs * float")       \
      .Input("state: num_state * resource")       \
      .Input("shards: num_shards * resource")     \
      .Input("slots: num_slot_shards * resource") \
      .Attr("num_inputs: int >= 1")               \
      .Attr("num_state: int >= 4")                \
      .Attr("num_shards: int >= 1")               \
      .Attr("num_slot_shards: int >= 0")          \
      .Attr("open_tables: list(int)")             \
      .Attr("key_kinds: list(int)")               \
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
Checks the batches of all replicas, gives new keys rows, and enqueues the step.

training: Whether gradients will follow; only then keys are counted, admitted
  and evicted.
ids: By replica, then by feature: keys where the table is open, else rows.
splits: As of `EnqueueStep`.
num_samples: [num_replicas * num_features].
weights: One factor per id, or none for 1 each.
state: By open table, the variables of its vocabulary, as of `EvictKeys`.
shards: All shards of the first open table, then those of the second, and so on.
slots: The same of each slot variable.
open_tables: Which tables of the engine are open.
key_kinds: Of each, what its keys are made of: 1 integers, 2 strings.
has_unknown_row: Of each, whether keys without a row share the one after those
  of its vocabulary; else they are zeros.
policies: Of each, six numbers, as of `EvictKeys`.
first_values: Of each, the distribution of first values, as of `FirstRows`.
first_limits: Of each, the two numbers of that.
first_seeds: Of each, the seed of that.
slot_values: Of each, what its slot variables start with.
telling: Of which tables it is told what went, as places in `open_tables`.
evicted: Of each of these: the keys whose rows others got, [num_evicted] int64;
  what their rows held before, [num_evicted, dim]; and each slot variable.
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
Opens a lookup of keys, which gives new ones rows; see `OpenStep`.

ids: By feature; all else as of `EnqueueKeys`.
token: Names the lookup.
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
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Undoes the last `EnqueueKeys`, `OpenKeys` or `EvictKeys`.

That is for a program that failed when it was told which keys went. The step
leaves the engine; keys get their rows and values back. It is refused if another
call has used the step or changed a vocabulary since.

why: What failed. Empty: nothing, and the op only forgets how to undo it.
state: As of the op that is undone; `shards` and `slots`, too.
raises: Whether the op fails with `why` once all is undone.
in_processes: Whether other processes have the step, too. Then it stays, and the
  engine refuses every later call until it is reset.
)doc");

#undef LM_KEYS_PORTS

}  // namespace
}  // namespace layoutmap
