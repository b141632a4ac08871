// Ops that read and update tables. docs/ops.md documents the ops.

#include <cstdint>

#include "cc/ops/ports.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace layoutmap {
namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("LayoutMap>LookupRows")
    .Input("shards: num_shards * resource")
    .Input("offsets: int64")
    .Input("ids: Tids")
    .Input("row_splits: int64")
    .Input("gains: float")
    .Output("activations: float")
    .Attr("num_shards: int >= 1")
    .Attr("placement: {'div', 'mod', 'offsets'}")
    .Attr("dim: int >= 1")
    .Attr("feature: string = ''")
    .Attr("table: string = ''")
    .Attr("Tids: {int32, int64}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t dim;
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      ShapeHandle offsets, ids, row_splits, gains;
      TF_RETURN_IF_ERROR(GetShape(c, "offsets", 1, &offsets));
      TF_RETURN_IF_ERROR(GetShape(c, "ids", 1, &ids));
      TF_RETURN_IF_ERROR(GetShape(c, "row_splits", 1, &row_splits));
      TF_RETURN_IF_ERROR(GetShape(c, "gains", &gains));
      TF_RETURN_IF_ERROR(c->Merge(ids, gains, &ids));
      DimensionHandle num_samples;
      TF_RETURN_IF_ERROR(c->Subtract(c->Dim(row_splits, 0), 1, &num_samples));
      return SetShape(c, "activations", c->Matrix(num_samples, dim));
    })
    .Doc(R"doc(
Sums the rows of each sample, scaled by their gains, directly from the shards.

shards: Float32 variables; shard `s` has shape [shard size, dim].
offsets: Cumulative shard sizes, [num_shards + 1].
ids: Global rows, [num_ids].
row_splits: Sample `s` has ids [row_splits[s], row_splits[s + 1]).
gains: One factor per id, [num_ids].
activations: [num_samples, dim]; zeros for a sample without ids.
placement: Assignment of rows to shards.
feature: Name of the feature, for error messages.
table: Name of the table, for error messages.
)doc");

REGISTER_OP("LayoutMap>ApplyRowGradients")
    .Input("shards: num_shards * resource")
    .Input("slots: num_slot_shards * resource")
    .Input("offsets: int64")
    .Input("unique_rows: Tids")
    .Input("unique_splits: int64")
    .Input("positions: int32")
    .Input("row_splits: int64")
    .Input("gains: float")
    .Input("gradients: float")
    .Input("hyperparameters: float")
    .Attr("num_shards: int >= 1")
    .Attr("num_slot_shards: int >= 0")
    .Attr("placement: {'div', 'mod', 'offsets'}")
    .Attr(
        "optimizer: {'sgd', 'adagrad', 'adagrad_per_id', "
        "'adagrad_momentum', 'adam', 'adam_per_id', 'ftrl', 'ftrl_per_id', "
        "'momentum', 'rmsprop', 'rmsprop_per_id', 'lamb'}")
    .Attr("table: string = ''")
    .Attr("Tids: {int32, int64}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      for (const char* vector :
           {"offsets", "unique_rows", "unique_splits", "positions",
            "row_splits", "gains", "hyperparameters"}) {
        TF_RETURN_IF_ERROR(GetShape(c, vector, 1, &unused));
      }
      return GetShape(c, "gradients", 2, &unused);
    })
    .Doc(R"doc(
Sums the gradients of each row and applies one optimizer step to it, in place.

shards: Float32 variables; shard `s` has shape [shard size, dim].
slots: The shards of each slot variable, one slot variable after the other.
offsets: Cumulative shard sizes, [num_shards + 1].
unique_rows: An output of `FindUniqueRows`.
unique_splits: An output of `FindUniqueRows`.
positions: An output of `FindUniqueRows`.
row_splits: Sample `s` has ids [row_splits[s], row_splits[s + 1]).
gains: One factor per id, [num_ids].
gradients: Gradients of the activations, [num_samples, dim].
hyperparameters: Hyperparameters of the optimizer, learning_rate first;
  docs/ops.md lists them.
table: Name of the table, for error messages.
)doc");

}  // namespace
}  // namespace layoutmap
