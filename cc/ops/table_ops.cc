// Ops that gather and scatter rows of sharded tables. docs/ops.md documents the
// ops.

#include "absl/status/status.h"
#include "cc/ops/ports.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace layoutmap {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Computes the shape of an output with one row per id. The first input is the
// handle of the first shard. If the shape of this handle is known, it
// determines the shape of a row.
absl::Status RowsShape(InferenceContext* c, ShapeHandle* rows) {
  ShapeHandle ids;
  TF_RETURN_IF_ERROR(GetShape(c, "ids", &ids));
  ShapeHandle row = c->UnknownShape();
  const auto* data = c->input_handle_shapes_and_types(0);
  if (data != nullptr && !data->empty() && c->RankKnown((*data)[0].shape)) {
    TF_RETURN_IF_ERROR(c->Subshape((*data)[0].shape, 1, &row));
  }
  return c->Concatenate(ids, row, rows);
}

REGISTER_OP("LayoutMap>GatherRows")
    .Input("shards: num_shards * resource")
    .Input("offsets: int64")
    .Input("ids: Tids")
    .Output("rows: dtype")
    .Attr("num_shards: int >= 1")
    .Attr("placement: {'div', 'mod', 'offsets'}")
    .Attr("dtype: type")
    .Attr("table: string = ''")
    .Attr("Tids: {int32, int64}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle rows;
      TF_RETURN_IF_ERROR(RowsShape(c, &rows));
      return SetShape(c, "rows", rows);
    })
    .Doc(R"doc(
Reads one row per id, in the order of the ids, directly from the shards.

shards: Variables; shard `s` has shape [shard size, *row_shape].
offsets: Cumulative shard sizes, [num_shards + 1].
ids: Global rows, any shape.
rows: [*ids.shape, *row_shape].
placement: Assignment of rows to shards.
table: Name of the table, for error messages.
)doc");

REGISTER_OP("LayoutMap>ScatterRows")
    .Input("shards: num_shards * resource")
    .Input("offsets: int64")
    .Input("ids: Tids")
    .Input("updates: dtype")
    .Attr("num_shards: int >= 1")
    .Attr("placement: {'div', 'mod', 'offsets'}")
    .Attr("verb: {'add', 'sub', 'mul', 'div', 'min', 'max', 'update'}")
    .Attr("dtype: type")
    .Attr("table: string = ''")
    .Attr("Tids: {int32, int64}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle updates, expected;
      TF_RETURN_IF_ERROR(GetShape(c, "updates", &updates));
      if (!c->RankKnown(updates) || c->Rank(updates) == 0) {
        return absl::OkStatus();
      }
      TF_RETURN_IF_ERROR(RowsShape(c, &expected));
      return c->Merge(updates, expected, &expected);
    })
    .Doc(R"doc(
Writes one row per id, in place. Repeated ids are all applied, in id order.

shards: Variables; shard `s` has shape [shard size, *row_shape].
offsets: Cumulative shard sizes, [num_shards + 1].
ids: Global rows, any shape.
updates: [*ids.shape, *row_shape], or one scalar for all rows.
placement: Assignment of rows to shards.
verb: Operation on a row: 'add' computes row + update, and so on; 'update'
  replaces the row.
table: Name of the table, for error messages.
)doc");

}  // namespace
}  // namespace layoutmap
