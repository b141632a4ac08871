// The part of an open vocabulary on a server, with the locks of its variables
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

// Neither copyable nor movable, because the views point to its partitions.
class LockedKeyPiece {
 public:
  LockedKeyPiece() = default;
  LockedKeyPiece(const LockedKeyPiece&) = delete;
  LockedKeyPiece& operator=(const LockedKeyPiece&) = delete;

  // Reads the state variables of a shard, from index `first` on, and sets the
  // number of buckets in `piece`. The variables are keys, last steps and
  // counts; the sketch and its sums if keys are admitted by their count; and
  // the numbers.
  absl::Status Find(const LockedShards& locked, int first, KeyPiece* piece);

  // Creates a view for finding rows.
  absl::Status View(const LockedShards& locked, const KeyPiece& piece,
                    KeyPieceStep* step);

  // Creates a view for changing the vocabulary. The shards must be locked
  // exclusively.
  absl::Status MutableView(tensorflow::OpKernelContext* ctx,
                           LockedShards* locked, const KeyPiece& piece,
                           KeyPieceStep* step);

  // Converts a view of the local shard to a view of its full table or slot
  // variable.
  template <typename T>
  void PlaceRows(ShardedView<T>* view) const {
    view->partition = &rows_;
    view->shards = {nullptr, view->shards[0], nullptr};
  }

  // Returns the values that cc/kernels/vocabulary/locked_vocabulary.h lists.
  // Requires a mutable view.
  Span<int64_t> numbers() const { return numbers_; }

  static int NumVariables(const KeyPiece& piece);

 private:
  int first_ = 0;
  RowPartition own_buckets_;  // of the shard's variables
  RowPartition buckets_;      // of the full vocabulary
  RowPartition rows_;         // of the full table
  Span<int64_t> numbers_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_SERVERS_LOCKED_KEY_PIECE_H_
