// Views of the variables of a shard with an open vocabulary.

#ifndef TF_LAYOUTMAP_KERNELS_SERVERS_OPEN_PIECE_VIEWS_H_
#define TF_LAYOUTMAP_KERNELS_SERVERS_OPEN_PIECE_VIEWS_H_

#include <cstddef>

#include "absl/status/status.h"
#include "cc/core/served_keys/key_pieces.h"
#include "cc/kernels/locked_shards.h"
#include "cc/kernels/servers/locked_key_piece.h"
#include "cc/kernels/servers/server_resource.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace layoutmap {

// Sets the views in `step` that are required to change the vocabulary and the
// rows of the open shard `i`. `locked` are the variables `fetch_keys` of the
// server, locked exclusively, and `view.Find` must have succeeded.
absl::Status ViewOpenPiece(tensorflow::OpKernelContext* ctx,
                           const ServerResource& server, size_t i,
                           const KeyPiece& piece, LockedShards* locked,
                           LockedKeyPiece* view, KeyPieceStep* step);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_SERVERS_OPEN_PIECE_VIEWS_H_
