// Ops that process ids and do not access tables. docs/ops.md documents the ops.

#include "cc/ops/ports.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace layoutmap {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("LayoutMap>AssignPartition")
    .Input("ids: Tids")
    .Input("offsets: int64")
    .Output("shards: int32")
    .Output("local_rows: Tids")
    .Attr("placement: {'div', 'mod', 'offsets'}")
    .Attr("Tids: {int32, int64}")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle ids, offsets;
      TF_RETURN_IF_ERROR(GetShape(c, "ids", &ids));
      TF_RETURN_IF_ERROR(GetShape(c, "offsets", 1, &offsets));
      TF_RETURN_IF_ERROR(SetShape(c, "shards", ids));
      return SetShape(c, "local_rows", ids);
    })
    .Doc(R"doc(
Finds the shard of each global row and the local row in that shard.

ids: Global rows, any shape; each in [0, num_rows).
offsets: Cumulative shard sizes, [num_shards + 1].
shards: Shard that owns each id, shaped like `ids`.
local_rows: Row within that shard, shaped like `ids`.
placement: Assignment of rows to shards: 'div' uses contiguous blocks of even
  size, 'mod' round robin, 'offsets' contiguous blocks of any size.
)doc");

REGISTER_OP("LayoutMap>RouteIds")
    .Input("ids: Tids")
    .Input("offsets: int64")
    .Output("local_rows: Tids")
    .Output("splits: int64")
    .Output("permutation: int32")
    .Output("inverse: int32")
    .Attr("placement: {'div', 'mod', 'offsets'}")
    .Attr("unique: bool = false")
    .Attr("table: string = ''")
    .Attr("Tids: {int32, int64}")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle ids, offsets;
      TF_RETURN_IF_ERROR(GetShape(c, "ids", 1, &ids));
      TF_RETURN_IF_ERROR(GetShape(c, "offsets", 1, &offsets));
      bool unique;
      TF_RETURN_IF_ERROR(c->GetAttr("unique", &unique));
      const ShapeHandle routed =
          unique ? c->Vector(InferenceContext::kUnknownDim) : ids;
      TF_RETURN_IF_ERROR(SetShape(c, "local_rows", routed));
      TF_RETURN_IF_ERROR(SetShape(c, "splits", offsets));
      TF_RETURN_IF_ERROR(SetShape(c, "permutation", routed));
      return SetShape(c, "inverse", ids);
    })
    .Doc(R"doc(
Groups ids by the shard that owns them, in one pass.

ids: Global rows, [num_ids].
offsets: Cumulative shard sizes, [num_shards + 1].
local_rows: Rows within the shards, shard by shard, [num_routed].
splits: Shard `s` owns slots [splits[s], splits[s + 1]).
permutation: Index into `ids` of the id of each slot; the first such index if
  `unique`.
inverse: Slot of each id, [num_ids].
unique: Whether each distinct row gets one slot, ascending within its shard.
  Otherwise each id gets one slot, in the order of `ids`.
table: Name of the table, for error messages.
)doc");

REGISTER_OP("LayoutMap>FindUniqueRows")
    .Input("ids: Tids")
    .Input("row_splits: int64")
    .Input("weights: float")
    .Output("gains: float")
    .Output("unique_rows: Tids")
    .Output("unique_splits: int64")
    .Output("positions: int32")
    .Attr("combiner: {'sum', 'mean', 'sqrtn'}")
    .Attr("num_rows: int >= 0")
    .Attr("feature: string = ''")
    .Attr("table: string = ''")
    .Attr("Tids: {int32, int64}")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle ids, unused;
      TF_RETURN_IF_ERROR(GetShape(c, "ids", 1, &ids));
      TF_RETURN_IF_ERROR(GetShape(c, "row_splits", 1, &unused));
      TF_RETURN_IF_ERROR(GetShape(c, "weights", 1, &unused));
      const ShapeHandle unknown = c->Vector(InferenceContext::kUnknownDim);
      TF_RETURN_IF_ERROR(SetShape(c, "gains", ids));
      TF_RETURN_IF_ERROR(SetShape(c, "unique_rows", unknown));
      TF_RETURN_IF_ERROR(SetShape(c, "unique_splits", unknown));
      return SetShape(c, "positions", ids);
    })
    .Doc(R"doc(
Checks ragged ids, computes their gains and finds the distinct rows.

ids: Global rows, [num_ids], each in [0, num_rows).
row_splits: Sample `s` has ids [row_splits[s], row_splits[s + 1]).
weights: One finite factor per id. An empty tensor means 1 for each id.
gains: Factor for the row of each id, [num_ids].
unique_rows: Distinct ids, ascending.
unique_splits: Row `u` has the `positions` [unique_splits[u], unique_splits[u +
  1]).
positions: Indices into `ids`, row by row, ascending within a row.
combiner: Gain of an id with weight w: w for sum, w / sum(w) for mean, w /
  sqrt(sum(w^2)) for sqrtn; 0 if the divisor is 0.
num_rows: Number of rows in the table.
feature: Name of the feature, for error messages.
table: Name of the table, for error messages.
)doc");

REGISTER_OP("LayoutMap>PackIds")
    .Input("ids: num_features * int64")
    .Input("splits: num_features * int64")
    .Input("num_samples: int64")
    .Input("weights: num_features * float")
    .Output("packed: int64")
    .Output("packed_weights: float")
    .Attr("num_features: int >= 1")
    .Attr("names: list(string)")
    .Attr("mark: int")
    .Attr("num_columns: int >= 0 = 0")
    .Attr("weighted: bool = false")
    .SetShapeFn([](InferenceContext* c) {
      int64_t num_columns;
      bool is_weighted;
      TF_RETURN_IF_ERROR(c->GetAttr("num_columns", &num_columns));
      TF_RETURN_IF_ERROR(c->GetAttr("weighted", &is_weighted));
      const ShapeHandle packed = c->Matrix(
          InferenceContext::kUnknownDim,
          num_columns > 0 ? num_columns : InferenceContext::kUnknownDim);
      TF_RETURN_IF_ERROR(SetShape(c, "packed", packed));
      return SetShape(c, "packed_weights", is_weighted ? packed : c->Vector(0));
    })
    .Doc(R"doc(
Packs the ids of all features of a batch into one matrix.

ids: Ids of each feature.
splits: row_splits [num_samples + 1], or empty for dense ids.
num_samples: [num_features], the same number for all features.
weights: For each feature, one factor per id. An empty tensor means 1 for each
  id.
packed: [num_samples, num_columns]. Each row holds the mark, the number of ids
  of each feature, the ids of all features, and zeros.
packed_weights: Factors at the positions of the ids and 1 elsewhere, shaped like
  `packed`; empty unless `weighted`.
names: Name of each feature, for error messages.
mark: Number that identifies the set of features.
num_columns: Number of columns, at least the number that the longest sample
  requires; 0 selects exactly that number.
weighted: Whether to return weights.
)doc");

}  // namespace
}  // namespace layoutmap
