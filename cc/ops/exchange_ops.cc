// Steps whose tables are divided among processes. docs/ops.md has the contract
// in one table.

#include <cstdint>

#include "cc/ops/engine_attrs.h"
#include "cc/ops/ports.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace layoutmap {
namespace {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("LayoutMap>PlanExchange")
    .Input("ids: num_inputs * Tids")
    .Input("splits: num_inputs * int64")
    .Input("num_samples: int64")
    .Input("weights: num_inputs * float")
    .Input("training: bool")
    .Output("plan: variant")
    .Output("requests: num_owners * uint32")
    .Output("contributions: num_owners * uint32")
    .Output("sizes: int64")
    .Output("error: string")
    .Attr("num_inputs: int >= 1")
    .Attr("Tids: {int32, int64}")
    .Attr("packed: bool = false")
    .Attr("mark: int = 0")
    .Attr("num_owners: int >= 1")
    .Attr("shard_owners: list(int)") LM_ENGINE_CONFIG_ATTRS
    .SetIsStateful()  // Neither folded nor left out, as `PlanStep`.
    .SetShapeFn([](InferenceContext* c) {
      int32_t num_owners;
      TF_RETURN_IF_ERROR(c->GetAttr("num_owners", &num_owners));
      TF_RETURN_IF_ERROR(SetShape(c, "plan", c->Scalar()));
      TF_RETURN_IF_ERROR(SetVectors(c, "requests", "num_owners"));
      TF_RETURN_IF_ERROR(SetVectors(c, "contributions", "num_owners"));
      TF_RETURN_IF_ERROR(SetShape(c, "sizes", c->Matrix(num_owners, 4)));
      return SetShape(c, "error", c->Scalar());
    })
    .Doc(R"doc(
Checks a batch and finds what the owner of each shard is asked and told of it.

ids, splits, num_samples, weights: As of `EnqueueStep`.
training: Whether gradients will follow; else there are no contributions.
plan: What the other ops of the step take, on the same device.
requests: By owner, the number of rows that are needed of each of its shards,
  then the rows, numbered in their shards.
contributions: By owner, the part of each feature that looks into its shards:
  what `ReadContributions` takes.
sizes: By owner: the sizes of its request and its contributions, of the rows
  that it will send, and of the gradients it will get.
error: What is wrong with the batch, or empty. An error of one process alone
  would leave the others waiting; so the processes tell each other first.
shard_owners: As `shard_servers` of `PlanStep`.
)doc");

REGISTER_OP("LayoutMap>WriteRequest")
    .Input("words: uint32")
    .Output("request: uint8")
    .Attr("num_shards: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      return SetShape(c, "request", c->Vector(InferenceContext::kUnknownDim));
    })
    .Doc(R"doc(
Writes what a process asks of the shards of this one as `FetchRows` takes it.

words: Of `requests` of `PlanExchange`. Rows of a shard ascend.
)doc");

REGISTER_OP("LayoutMap>ReadContributions")
    .Input("words: uint32")
    .Output("ids: num_features * int64")
    .Output("splits: num_features * int64")
    .Output("weights: num_features * float")
    .Output("num_samples: int64")
    .Attr("num_features: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      int32_t num_features;
      TF_RETURN_IF_ERROR(c->GetAttr("num_features", &num_features));
      TF_RETURN_IF_ERROR(SetVectors(c, "ids", "num_features"));
      TF_RETURN_IF_ERROR(SetVectors(c, "splits", "num_features"));
      TF_RETURN_IF_ERROR(SetVectors(c, "weights", "num_features"));
      return SetShape(c, "num_samples", c->Vector(num_features));
    })
    .Doc(R"doc(
Reads what a process contributes to the shards of this one, for `EnqueueStep`.

words: Of `PlanExchange`, or none.
ids: By feature, rows of the shard.
weights: By feature, the gain of each id; none where they are 1 each.
num_samples: By feature, the activations that have an id there.
)doc");

REGISTER_OP("LayoutMap>SplitGradients")
    .Input("plan: variant")
    .Input("gradients: num_features * float")
    .Output("values: num_owners * float")
    .Attr("num_owners: int >= 1")
    .Attr("num_features: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      return SetVectors(c, "values", "num_owners");
    })
    .Doc(R"doc(
Gives each owner the gradients of the activations that it contributed to.

plan: Of `PlanExchange`.
gradients: Shaped like the activations.
values: By owner, feature by feature, the gradient of each activation in its
  contributions.
)doc");

}  // namespace
}  // namespace layoutmap
