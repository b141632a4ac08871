#include "cc/kernels/servers/open_piece_views.h"

#include <cstddef>

#include "absl/status/status.h"
#include "cc/core/base/row_type.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/served_keys/key_pieces.h"
#include "cc/core/servers/pieces.h"
#include "cc/core/vocabulary/first_rows.h"
#include "cc/kernels/locked_shards.h"
#include "cc/kernels/servers/locked_key_piece.h"
#include "cc/kernels/servers/pieces_op.h"
#include "cc/kernels/servers/server_resource.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace layoutmap {

absl::Status ViewOpenPiece(tensorflow::OpKernelContext* ctx,
                           const ServerResource& server, size_t i,
                           const KeyPiece& key_piece, LockedShards* locked,
                           LockedKeyPiece* view, KeyPieceStep* step) {
  const OpenPiece& open = server.settings().open[i];
  const Piece& piece = server.pieces()[open.place];
  const RowPartition& partition = server.partitions()[open.place];
  FirstRows& rows = step->first_rows;
  TF_RETURN_IF_ERROR(view->MutableView(ctx, locked, key_piece, step));
  rows.values = open.values;
  rows.row_type = piece.row_type;
  rows.slot_values = open.slot_values;
  if (piece.row_type == RowType::kFloat32) {
    TF_RETURN_IF_ERROR(locked->MutableView(
        ctx, open.place, piece.table, partition, {piece.dim}, &rows.table));
    view->PlaceRows(&rows.table);
  } else {
    TF_RETURN_IF_ERROR(locked->MutableView(ctx, open.place, piece.table,
                                           partition, {piece.dim},
                                           &rows.half_table, DtypeOf(piece)));
    view->PlaceRows(&rows.half_table);
  }
  rows.slots.resize(NumSlots(piece.optimizer));
  int next_slot = open.first_slot;
  for (size_t j = 0; j < rows.slots.size(); ++j) {
    TF_RETURN_IF_ERROR(locked->MutableView(
        ctx, next_slot++, piece.table + " (slot variable)", partition,
        {SlotDim(piece.optimizer, static_cast<int>(j), piece.dim)},
        &rows.slots[j]));
    view->PlaceRows(&rows.slots[j]);
  }
  return absl::OkStatus();
}

}  // namespace layoutmap
