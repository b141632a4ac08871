// Ops for parameter server steps. docs/ops.md documents the ops.

#include <cstdint>
#include <vector>

#include "cc/ops/engine_attrs.h"
#include "cc/ops/ports.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace layoutmap {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ScalarShape;

REGISTER_OP("LayoutMap>PlanStep")
    .Input("ids: num_inputs * Tids")
    .Input("splits: num_inputs * int64")
    .Input("num_samples: int64")
    .Input("weights: num_inputs * float")
    .Output("plan: variant")
    .Output("requests: num_servers * uint8")
    .Attr("num_inputs: int >= 1")
    .Attr("Tids: {int32, int64}")
    .Attr("packed: bool = false")
    .Attr("mark: int = 0")
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
Checks a batch and finds which rows of each server it needs.

ids: As in `EnqueueStep`.
splits: As in `EnqueueStep`.
num_samples: As in `EnqueueStep`.
weights: As in `EnqueueStep`.
plan: Plan that the other ops of the step accept on the same device.
requests: For each server, first the type of values (4 bytes: 0 float32, 1
  bfloat16) and the number of rows of each shard of the server (4 bytes each),
  by table and then by shard. Then the rows as local row numbers of their
  shards, ascending, each encoded as the difference from the previous row of its
  shard: 7 bits per byte, lowest bits first, with the upper bit set if another
  byte follows.
wire_dtype: Type of rows and gradients in messages between processes. With
  bfloat16, each value is rounded to the nearest bfloat16; a finite value stays
  finite.
shard_servers: Server of each shard: of all shards of the first table, then of
  all shards of the second, and so on.
)doc");

REGISTER_OP("LayoutMap>GradientCoordinates")
    .Input("plan: variant")
    .Input("gradients: num_values * float")
    .Output("coordinates: float")
    .Attr("num_values: int >= 1")
    .Attr("num_gradients: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int32_t num_gradients;
      TF_RETURN_IF_ERROR(c->GetAttr("num_gradients", &num_gradients));
      return SetShape(c, "coordinates", c->Vector(num_gradients));
    })
    .Doc(R"doc(
Computes coordinates of the last of several gradients of one batch.

The norms and the inner products of the coordinates are equal to the norms and
the inner products of the gradients. The coordinates of an earlier gradient are
the result for the gradients up to this gradient.

plan: Output of `PlanStep`, `PlaceKeys` or `PlanExchange`.
gradients: For each gradient, one tensor per feature.
)doc");

REGISTER_OP("LayoutMap>CreateServer")
    .Input("shards: num_shards * resource")
    .Input("slots: num_slot_shards * resource")
    .Input("rounding_steps: num_half_shards * resource")
    .Input("state: num_state * resource")
    .Input("fetched_steps: num_fetched * resource")
    .Input("applied: resource")
    .Output("server: resource")
    .Attr("num_shards: int >= 1")
    .Attr("num_slot_shards: int >= 0")
    .Attr("num_half_shards: int >= 0")
    .Attr("num_state: int >= 0")
    .Attr("num_fetched: int >= 0")
    .Attr("tables: list(string)")
    .Attr("table_numbers: list(int)")
    .Attr("first_rows: list(int)")
    .Attr("dims: list(int)")
    .Attr("dtypes: list({float, bfloat16, half})")
    .Attr("optimizers: list(string)")
    .Attr("num_hyperparameters: list(int)")
    .Attr("rounding_seed: int = 0")
    .Attr("open_pieces: list(int) = []")
    .Attr("first_buckets: list(int) = []")
    .Attr("vocabulary_buckets: list(int) = []")
    .Attr("has_unknown_row: list(bool) = []")
    .Attr("admissions: list(string) = []")
    .Attr("evictions: list(string) = []")
    .Attr("policies: list(int) = []")
    .Attr("first_values: list(string) = []")
    .Attr("first_limits: list(float) = []")
    .Attr("first_seeds: list(int) = []")
    .Attr("slot_values: list(float) = []")
    .Attr("vocabulary_of: list(int) = []")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc(R"doc(
Creates the resource that the other ops of a server use.

The resource contains references to all variables of the server. It exists as
long as there is a handle to it.

shards: All shards on this server, by table, then by shard.
slots: Shard by shard, one slot variable after the other.
rounding_steps: For each shard with 16-bit rows, the int64 variable that counts
  its updates.
state: For each shard that owns a vocabulary, its keys, their last steps and
  their counts; its sketch and the sums of the sketch if keys are admitted by
  their count; its numbers.
fetched_steps: Record of the steps whose gradients are pending: an int64
  variable [8963] with zeros as initial values. Empty if no table of the
  embedding has an open vocabulary.
applied: Record of the applied closures: an int64 variable [2054] with zeros as
  initial values. It holds the epoch, the number below which all closures were
  applied, the number of updates so far, the sum and the maximum of the updates
  between a fetch and its apply, and the number of repeated closures; then
  number + 1 and attempt of each of 1,024 closures.
server: Handle that the other ops accept.
tables: For each shard, the name of its table, for error messages.
table_numbers: For each shard, the index of its table among all tables.
first_rows: For each shard, its first row in its table.
dims: For each shard, the number of columns of its table.
dtypes: For each shard, the storage type of its rows.
optimizers: For each shard, the optimizer of its table, or 'none'.
num_hyperparameters: For each shard, the number of hyperparameters of its
  optimizer.
rounding_seed: As in `CreateHostEngine`.
open_pieces: Indices of the shards that belong to open tables.
first_buckets: First bucket of each such shard. A shard consists of complete
  segments.
vocabulary_buckets: For each such shard, the number of buckets of the full
  vocabulary.
has_unknown_row: For each such shard, whether its last row is the row of unknown
  keys, which are then trained.
admissions: For each such shard, as in `EnqueueKeys`.
evictions: For each such shard, as in `EnqueueKeys`.
policies: For each such shard, as in `EnqueueKeys`.
first_values: For each such shard, as in `EnqueueKeys`.
first_limits: For each such shard, as in `EnqueueKeys`.
first_seeds: For each such shard, as in `EnqueueKeys`.
slot_values: For each such shard, the initial values of its slot variables.
vocabulary_of: For each such shard, the index into `open_pieces` of the shard
  that owns its vocabulary, whose policies are used. Empty: each shard owns one.
)doc");

REGISTER_OP("LayoutMap>FetchServerRows")
    .Input("server: resource")
    .Input("request: uint8")
    .Output("fetched: uint8")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      return SetShape(c, "fetched", c->Vector(InferenceContext::kUnknownDim));
    })
    .Doc(R"doc(
Reads rows of all shards on a server.

server: Output of `CreateServer`.
request: Output of `PlanStep`.
fetched: Number of updates so far (8 bytes), followed by the rows of all shards
  in the order of the request.
)doc");

REGISTER_OP("LayoutMap>FetchRows")
    .Input("shards: num_shards * resource")
    .Input("applied: resource")
    .Input("request: uint8")
    .Output("fetched: uint8")
    .Attr("num_shards: int >= 1")
    .Attr("tables: list(string)")
    .Attr("dims: list(int)")
    .Attr("dtypes: list({float, bfloat16, half})")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      return SetShape(c, "fetched", c->Vector(InferenceContext::kUnknownDim));
    })
    .Doc(R"doc(
Reads rows of shards, as `FetchServerRows`, without a server resource.

shards: All shards in this process, by table, then by shard.
applied: The int64 variable [2054] of `CreateServer`.
request: As in `FetchServerRows`.
fetched: As in `FetchServerRows`.
tables: For each shard, the name of its table, for error messages.
dims: For each shard, the number of columns of its table.
dtypes: For each shard, the storage type of its rows.
)doc");

REGISTER_OP("LayoutMap>CombineRows")
    .Input("plan: variant")
    .Input("fetched: num_servers * uint8")
    .Output("activations: num_features * float")
    .Attr("num_servers: int >= 1")
    .Attr("num_features: int >= 1")
    .Attr("dims: list(int)")
    .Attr("max_sequence_lengths: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> dims, lengths;
      TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
      TF_RETURN_IF_ERROR(c->GetAttr("max_sequence_lengths", &lengths));
      return SetActivationShapes(c, dims, lengths);
    })
    .Doc(R"doc(
Looks up a batch in the rows that were fetched for it.

plan: Output of `PlanStep`.
fetched: For each server, the output of `FetchServerRows`.
activations: As in `DequeueStep`.
)doc");

REGISTER_OP("LayoutMap>FoldGradients")
    .Input("plan: variant")
    .Input("fetched: num_fetched * uint8")
    .Input("gradients: num_features * float")
    .Input("hyperparameters: num_tables * float")
    .Input("token: int64")
    .Input("next: num_next * uint8")
    .Output("requests: num_servers * uint8")
    .Attr("num_servers: int >= 1")
    .Attr("num_fetched: int >= 0")
    .Attr("num_features: int >= 1")
    .Attr("num_tables: int >= 1")
    .Attr("num_next: int >= 0")
    .SetShapeFn([](InferenceContext* c) {
      return SetVectors(c, "requests", "num_servers");
    })
    .Doc(R"doc(
Sums the gradients of each unique row of a batch.

plan: Output of `PlanStep`.
fetched: For each server, the output of `FetchServerRows`, or its first 8 bytes.
  Empty if the rows were read in another way; the update then counts the
  staleness 0.
gradients: Gradients of the activations, with the same shapes.
hyperparameters: Hyperparameters of each table, in the order that its optimizer
  defines.
token: [3]: epoch, number and attempt of the closure; number -1 if there is no
  closure.
next: Empty, or for each server a request of `PlanStep` for a later batch.
requests: For each server, first the epoch, number, attempt and the number of
  updates when the rows were fetched (8 bytes each). Then the type of values,
  the number of rows of each shard, and the hyperparameters of its shards as
  float32 (4 bytes each). Then one gradient for each row, and last the rows, as
  in `PlanStep`. Each row occurs once, or once per contribution if the optimizer
  applies one step per contribution. With `next`, each output is a request of
  `ApplyAndFetchRows`: the size of this message (8 bytes), the message, zeros up
  to a multiple of 8 bytes, and the request of the later batch.
)doc");

REGISTER_OP("LayoutMap>BundleRequests")
    .Input("requests: num_requests * uint8")
    .Output("bundle: uint8")
    .Attr("num_requests: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      return SetShape(c, "bundle", c->Vector(InferenceContext::kUnknownDim));
    })
    .Doc(R"doc(
Joins requests to several embeddings on the same server to one tensor.

requests: The requests, each one a vector.
bundle: The size of each request (8 bytes each). Then the requests, each
  followed by zeros up to a multiple of 8 bytes.
)doc");

REGISTER_OP("LayoutMap>ApplyRows")
    .Input("server: resource")
    .Input("request: uint8")
    .Output("is_new: bool")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc(R"doc(
Updates rows of all shards on a server, once for each closure.

If a table has an open vocabulary, the op fails if the rows of the step are no
longer pinned.

server: Output of `CreateServer`.
request: Output of `FoldGradients`.
is_new: False if the closure was already applied. In this case the op changes
  nothing.
)doc");

REGISTER_OP("LayoutMap>ApplyRowsOfBundle")
    .Input("servers: num_embeddings * resource")
    .Input("bundle: uint8")
    .Output("is_new: bool")
    .Attr("num_embeddings: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t num_embeddings;
      TF_RETURN_IF_ERROR(c->GetAttr("num_embeddings", &num_embeddings));
      return SetShape(c, "is_new", c->Vector(num_embeddings));
    })
    .Doc(R"doc(
Updates rows of several embeddings on a server, as `ApplyRows` does for one.

The embeddings are updated one after the other. If a request is not valid for
its embedding, the op changes nothing. If an update fails for another reason,
for example because a variable is not initialized, the earlier updates remain.

servers: For each embedding, the output of `CreateServer` on this server.
bundle: Output of `BundleRequests` for one request of `FoldGradients` per
  embedding.
is_new: As in `ApplyRows`, for each embedding.
)doc");

REGISTER_OP("LayoutMap>ApplyAndFetchRows")
    .Input("server: resource")
    .Input("request: uint8")
    .Output("is_new: bool")
    .Output("fetched: uint8")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(SetShape(c, "is_new", c->Scalar()));
      return SetShape(c, "fetched", c->Vector(InferenceContext::kUnknownDim));
    })
    .Doc(R"doc(
Updates rows of all shards on a server, and then reads rows of a later batch.

A request that is not valid changes nothing.

server: Output of `CreateServer`.
request: Output of `FoldGradients` with `next`.
is_new: As in `ApplyRows`. The op also reads the rows if this value is false.
fetched: As in `FetchServerRows`.
)doc");

}  // namespace
}  // namespace layoutmap
