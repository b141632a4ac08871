// The part of an open vocabulary that a server has, under the locks of its
// variables.

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

// Not copied or moved: the views have its partitions.
class LockedKeyPiece {
 public:
  LockedKeyPiece() = default;
  LockedKeyPiece(const LockedKeyPiece&) = delete;
  LockedKeyPiece& operator=(const LockedKeyPiece&) = delete;

  // Takes the variables of a shard's state from number `first` on, and fills
  // in how many buckets it has. Variables: keys, last steps, counts; sketch and
  // sums of it where keys are admitted by their count; numbers.
  absl::Status Find(const LockedShards& locked, int first, KeyPiece* piece);

  // Where rows are only found.
  absl::Status View(const LockedShards& locked, const KeyPiece& piece,
                    KeyPieceStep* step);

  // Where the vocabulary may change. The shards are locked exclusively.
  absl::Status MutableView(tensorflow::OpKernelContext* ctx,
                           LockedShards* locked, const KeyPiece& piece,
                           KeyPieceStep* step);

  // The view of its table, or of a slot variable, whose shard alone is here.
  template <typename T>
  void PlaceRows(ShardedView<T>* view) const {
    view->partition = &rows_;
    view->shards = {nullptr, view->shards[0], nullptr};
  }

  // Of a mutable view: what cc/kernels/vocabulary/locked_vocabulary.h lists.
  Span<int64_t> numbers() const { return numbers_; }

  static int NumVariables(const KeyPiece& piece);

 private:
  int first_ = 0;
  RowPartition own_buckets_;  // of the shard's variables
  RowPartition buckets_;      // of the whole vocabulary
  RowPartition rows_;         // of the whole table
  Span<int64_t> numbers_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_SERVERS_LOCKED_KEY_PIECE_H_
