// The shard of an open vocabulary on a server. The locks of its variables are
// held.

#ifndef TF_LAYOUTMAP_KERNELS_SERVERS_LOCKED_KEY_PIECE_H_
#define TF_LAYOUTMAP_KERNELS_SERVERS_LOCKED_KEY_PIECE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "cc/core/base/views.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/served_keys/key_pieces.h"
#include "cc/kernels/locked_shards.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace layoutmap {

// A locked shard of a vocabulary. Objects cannot be copied or moved, because
// views point to their partitions.
class LockedKeyPiece {
 public:
  LockedKeyPiece() = default;
  LockedKeyPiece(const LockedKeyPiece&) = delete;
  LockedKeyPiece& operator=(const LockedKeyPiece&) = delete;

  // Finds the state variables of a shard, which start at index `first`, and
  // sets the number of buckets in `piece`. If shards share a vocabulary, all of
  // them use the variables of its owner. The order of the variables is: keys,
  // last steps, counts, the sketch and its sums (only if keys are admitted by
  // count), and the numbers.
  absl::Status Find(const LockedShards& locked, int first, KeyPiece* piece);

  // Sets the view in `step` that is required to find rows.
  absl::Status View(const LockedShards& locked, const KeyPiece& piece,
                    KeyPieceStep* step);

  // Sets the views in `step` that are required to change the vocabulary. The
  // shards must be locked exclusively.
  absl::Status MutableView(tensorflow::OpKernelContext* ctx,
                           LockedShards* locked, const KeyPiece& piece,
                           KeyPieceStep* step);

  // Converts a view of the local shard to a view of the full table or slot
  // variable.
  template <typename T>
  void PlaceRows(ShardedView<T>* view) const {
    view->partition = &rows_;
    view->shards = {nullptr, view->shards[0], nullptr};
  }

  // Returns the numbers of the vocabulary, which are listed in
  // cc/kernels/vocabulary/locked_vocabulary.h. Call this method only after
  // `MutableView`.
  Span<int64_t> numbers() const { return numbers_; }

  static int NumVariables(const KeyPiece& piece);

 private:
  int first_ = 0;
  // The partition of the shard's variables.
  RowPartition own_buckets_;
  // The partition of the full vocabulary.
  RowPartition buckets_;
  // The partition of the full table.
  RowPartition rows_;
  Span<int64_t> numbers_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_SERVERS_LOCKED_KEY_PIECE_H_
