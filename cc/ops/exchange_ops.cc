// Ops for steps whose tables are sharded over processes. docs/ops.md documents
// the ops.

#include <cstdint>

#include "absl/status/status.h"
#include "cc/ops/engine_attrs.h"
#include "cc/ops/ports.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace layoutmap {
namespace {

using tensorflow::shape_inference::InferenceContext;

// Sets the shapes of the outputs of `PlanExchange`.
absl::Status SetPlanShapes(InferenceContext* c) {
  int32_t num_owners;
  TF_RETURN_IF_ERROR(c->GetAttr("num_owners", &num_owners));
  TF_RETURN_IF_ERROR(SetShape(c, "plan", c->Scalar()));
  TF_RETURN_IF_ERROR(SetVectors(c, "requests", "num_owners"));
  TF_RETURN_IF_ERROR(SetVectors(c, "contributions", "num_owners"));
  TF_RETURN_IF_ERROR(SetShape(c, "sizes", c->Matrix(num_owners, 4)));
  return SetShape(c, "error", c->Scalar());
}

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
    // The op rejects invalid ids, so grappler must not fold or prune it.
    .SetIsStateful()
    .SetShapeFn(SetPlanShapes)
    .Doc(R"doc(
Checks a batch and computes the messages to the owner of each shard.

ids: As in `EnqueueStep`.
splits: As in `EnqueueStep`.
num_samples: As in `EnqueueStep`.
weights: As in `EnqueueStep`.
training: Whether gradients will follow. Otherwise there are no contributions.
plan: Plan that the other ops of the step accept on the same device.
requests: For each owner, the number of rows that the batch needs from each of
  its shards, followed by the rows as local row numbers of the shards.
contributions: For each owner, the part of each feature that uses its shards, in
  the format that `ReadContributions` accepts.
sizes: For each owner, four sizes: its request, its contributions, the rows that
  it will send, and the gradients that it will receive.
error: Error message for an invalid batch, or an empty string. The op does not
  fail, because the other processes would then wait for this one; the processes
  exchange the messages first.
shard_owners: Owner of each shard, in the order of `shard_servers` of
  `PlanStep`.
)doc");

REGISTER_OP("LayoutMap>RequestKeys")
    .Input("ids: num_inputs * int64")
    .Input("splits: num_inputs * int64")
    .Input("num_samples: int64")
    .Input("weights: num_inputs * float")
    .Output("requests: num_owners * uint32")
    .Output("sizes: int64")
    .Output("error: string")
    .Attr("num_inputs: int >= 1")
    .Attr("open_tables: list(int)")
    .Attr("has_unknown_row: list(bool)")
    .Attr("num_owners: int >= 1")
    .Attr("shard_owners: list(int)") LM_ENGINE_CONFIG_ATTRS.SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int32_t num_owners;
      TF_RETURN_IF_ERROR(c->GetAttr("num_owners", &num_owners));
      TF_RETURN_IF_ERROR(SetVectors(c, "requests", "num_owners"));
      TF_RETURN_IF_ERROR(SetShape(c, "sizes", c->Matrix(num_owners, 2)));
      return SetShape(c, "error", c->Scalar());
    })
    .Doc(R"doc(
Checks a batch and writes the keys of open vocabularies to their owners.

ids: For each feature, keys if the table has an open vocabulary, otherwise rows.
splits: As in `EnqueueStep`.
num_samples: As in `EnqueueStep`.
weights: As in `EnqueueStep`.
requests: For each owner, the keys of each feature whose table has an open
  vocabulary, in the format that `AdmitRequests` accepts.
sizes: For each owner, the number of words of its request, and the number of
  rows that it will return.
error: As in `PlanExchange`.
open_tables: Indices of the tables with an open vocabulary.
has_unknown_row: For each open table, whether unknown keys share a row.
shard_owners: As in `PlanExchange`. Shards of open tables consist of complete
  segments.
)doc");

REGISTER_OP("LayoutMap>PlanKeyExchange")
    .Input("ids: num_inputs * int64")
    .Input("splits: num_inputs * int64")
    .Input("num_samples: int64")
    .Input("weights: num_inputs * float")
    .Input("training: bool")
    .Input("rows: num_owners * uint32")
    .Output("plan: variant")
    .Output("requests: num_owners * uint32")
    .Output("contributions: num_owners * uint32")
    .Output("sizes: int64")
    .Output("error: string")
    .Attr("num_inputs: int >= 1")
    .Attr("open_tables: list(int)")
    .Attr("has_unknown_row: list(bool)")
    .Attr("num_owners: int >= 1")
    .Attr("shard_owners: list(int)") LM_ENGINE_CONFIG_ATTRS.SetIsStateful()
    .SetShapeFn(SetPlanShapes)
    .Doc(R"doc(
Plans a step like `PlanExchange`, for a batch with keys of open vocabularies.

ids: As in `RequestKeys`, like `splits`, `num_samples` and `weights`.
training: Whether to send contributions.
rows: For each owner, the rows of the keys in its request, which `AdmitRequests`
  returned.
)doc");

REGISTER_OP("LayoutMap>WriteRequest")
    .Input("words: uint32")
    .Output("request: uint8")
    .Attr("num_shards: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      return SetShape(c, "request", c->Vector(InferenceContext::kUnknownDim));
    })
    .Doc(R"doc(
Converts the row request of another process to the format of `FetchRows`.

words: One element of `requests` of `PlanExchange`. The rows of each shard
  ascend.
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
Reads the contribution of a process to the local shards, for `EnqueueStep`.

words: One element of `contributions` of `PlanExchange`, or an empty tensor.
ids: For each feature, rows of the shard.
weights: For each feature, the gain of each id. An empty tensor means 1 for each
  id.
num_samples: For each feature, the number of activations that have an id there.
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
Selects for each owner the gradients of the activations it contributed to.

plan: Output of `PlanExchange`.
gradients: Gradients of the activations, with the same shapes.
values: For each owner, feature by feature, the gradient of each activation in
  its contributions.
)doc");

}  // namespace
}  // namespace layoutmap
