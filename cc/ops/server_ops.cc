// Steps over parameter servers. docs/ops.md has the contract in one table.

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
    .SetIsStateful()  // Neither folded nor left out: it refuses bad ids.
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(SetShape(c, "plan", c->Scalar()));
      return SetVectors(c, "requests", "num_servers");
    })
    .Doc(R"doc(
Checks a batch and finds which rows of which server it needs.

ids, splits, num_samples, weights: As of `EnqueueStep`.
plan: What the other ops of the step take, on the same device.
requests: By server, of which type values are (4 bytes: 0 float32, 1 bfloat16)
  and the number of rows of each shard there (4 bytes each), by table and then
  by shard; then the rows, numbered in their shard and ascending, each as the
  difference to the one before it in its shard, 7 bits in a byte, the lowest
  first, the upper bit set where another byte follows.
wire_dtype: How rows and gradients go from process to process. As bfloat16 each
  value becomes the nearest one; a finite value stays finite.
shard_servers: Of all shards of the first table, then those of the second, and
  so on, the server that each is on.
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
Reads rows of all shards on a server.

shards: All shards on this server, by table, then by shard.
applied: The int64 variable [2054] of `ApplyRows`.
request: As of `PlanStep`.
fetched: The number of updates so far (8 bytes), and the rows of all shards after
  each other, as the request has them.
tables: Of each shard, the name of its table, for messages.
dims: Of each shard, the columns of its table.
dtypes: Of each shard, how its rows are stored.
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
Looks a batch up in the rows that were fetched for it.

plan: Of `PlanStep`.
fetched: By server, of `FetchRows`.
activations: As of `DequeueStep`.
)doc");

REGISTER_OP("LayoutMap>FoldGradients")
    .Input("plan: variant")
    .Input("fetched: num_servers * uint8")
    .Input("gradients: num_features * float")
    .Input("hyperparameters: num_tables * float")
    .Input("token: int64")
    .Output("requests: num_servers * uint8")
    .Attr("num_servers: int >= 1")
    .Attr("num_features: int >= 1")
    .Attr("num_tables: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      return SetVectors(c, "requests", "num_servers");
    })
    .Doc(R"doc(
Sums the gradients of each unique row of a batch.

plan: Of `PlanStep`.
fetched: By server, of `FetchRows`.
gradients: Shaped like the activations.
hyperparameters: By table, as its optimizer orders them.
token: [3]: epoch, number and attempt of the closure; number -1 for none.
requests: By server: epoch, number, attempt and the number of updates when the
  rows were fetched (8 bytes each); the type of values, the number of rows of
  each shard, and the hyperparameters of its shards, float32 (4 bytes each); a
  gradient for each row; the rows, as of `PlanStep`. A row comes once, or where
  a rule takes one step per contribution, once for each.
)doc");

REGISTER_OP("LayoutMap>ApplyRows")
    .Input("shards: num_shards * resource")
    .Input("slots: num_slot_shards * resource")
    .Input("rounding_steps: num_half_shards * resource")
    .Input("fetched_steps: num_fetched * resource")
    .Input("applied: resource")
    .Input("request: uint8")
    .Output("is_new: bool")
    .Attr("num_shards: int >= 1")
    .Attr("num_slot_shards: int >= 0")
    .Attr("num_half_shards: int >= 0")
    .Attr("num_fetched: int >= 0")
    .Attr("tables: list(string)")
    .Attr("table_numbers: list(int)")
    .Attr("first_rows: list(int)")
    .Attr("dims: list(int)")
    .Attr("dtypes: list({float, bfloat16, half})")
    .Attr("optimizers: list(string)")
    .Attr("num_hyperparameters: list(int)")
    .Attr("rounding_seed: int = 0")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc(R"doc(
Updates rows of all shards on a server, once for each closure.

shards: All shards on this server, by table, then by shard.
slots: Shard by shard, one slot variable after the other.
rounding_steps: Of each shard with 16-bit rows, the int64 that counts its
  updates.
fetched_steps: None; or, where tables have open vocabularies, that of
  `FetchKeys`: a step whose rows are no longer pinned is refused.
applied: Which closures were applied, an int64 variable [2054] that starts as
  zeros: epoch, the number below which all were applied, updates so far, sum and
  maximum of the updates between a fetch and its apply, closures that came
  again; then number + 1 and attempt of each of 1,024 closures.
request: Of `FoldGradients`.
is_new: False if the closure had been applied, and nothing has changed.
table_numbers: Of each shard, the place of its table among all tables.
first_rows: Of each shard, its first row in its table.
num_hyperparameters: Of each shard, those of its optimizer.
rounding_seed: As of `CreateHostEngine`.
)doc");

}  // namespace
}  // namespace layoutmap
