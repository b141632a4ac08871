#include "cc/kernels/servers/locked_key_piece.h"

#include <cstdint>

#include "absl/status/status.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/policy.h"
#include "cc/core/keys/sketch.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/served_keys/key_pieces.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "cc/kernels/servers/pieces_op.h"
#include "cc/kernels/vocabulary/locked_vocabulary.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace layoutmap {
namespace {

// Changes a view with one shard to a view with three shards. The existing shard
// becomes the second shard.
template <typename T>
void PlaceBuckets(const RowPartition* buckets, ShardedView<T>* view) {
  view->partition = buckets;
  view->shards = {nullptr, view->shards[0], nullptr};
}

// Returns a view of an unsharded variable. The variable has one row per
// segment, or it contains the numbers of the vocabulary.
template <typename T>
absl::Status UnshardedView(tensorflow::OpKernelContext* ctx,
                           LockedShards* locked, int which,
                           const std::string& name, int64_t num_rows,
                           const tensorflow::TensorShape& row_shape,
                           Span<T>* span) {
  RowPartition whole;
  TF_RETURN_IF_ERROR(OneShard(num_rows, &whole));
  ShardedView<T> view;
  TF_RETURN_IF_ERROR(
      locked->MutableView(ctx, which, name, whole, row_shape, &view));
  *span = {view.shards[0], num_rows * row_shape.num_elements()};
  return absl::OkStatus();
}

}  // namespace

int LockedKeyPiece::NumVariables(const KeyPiece& piece) {
  return NumStateVariables(piece.policy, 1);
}

absl::Status LockedKeyPiece::Find(const LockedShards& locked, int first,
                                  KeyPiece* piece) {
  first_ = first;
  TF_RETURN_IF_ERROR(
      locked.NumRows(first, piece->table + " (keys)", &piece->num_buckets));
  TF_RETURN_IF_ERROR(ToTf(CheckKeyPiece(*piece)));
  TF_RETURN_IF_ERROR(OneShard(piece->num_buckets, &own_buckets_));
  const int64_t total = piece->layout.num_buckets();
  TF_RETURN_IF_ERROR(
      ToTf(PartOf(total, piece->first_bucket, piece->num_buckets, &buckets_)));
  // The partition does not include the row for unknown keys, because it is not
  // the row of a key.
  return ToTf(PartOf(total * kKeysPerBucket, piece->first_row(),
                     piece->num_buckets * kKeysPerBucket, &rows_));
}

absl::Status LockedKeyPiece::View(const LockedShards& locked,
                                  const KeyPiece& piece, KeyPieceStep* step) {
  TF_RETURN_IF_ERROR(locked.View(first_, piece.table + " (keys)", own_buckets_,
                                 {kKeysPerBucket}, &step->stored));
  PlaceBuckets(&buckets_, &step->stored);
  return absl::OkStatus();
}

absl::Status LockedKeyPiece::MutableView(tensorflow::OpKernelContext* ctx,
                                         LockedShards* locked,
                                         const KeyPiece& piece,
                                         KeyPieceStep* step) {
  const tensorflow::TensorShape bucket({kKeysPerBucket});
  VocabularyState& state = step->state;
  const std::string& table = piece.table;
  TF_RETURN_IF_ERROR(locked->MutableView(ctx, first_, table + " (keys)",
                                         own_buckets_, bucket, &state.keys));
  TF_RETURN_IF_ERROR(locked->MutableView(ctx, first_ + 1,
                                         table + " (last_step)", own_buckets_,
                                         bucket, &state.last_step));
  TF_RETURN_IF_ERROR(locked->MutableView(ctx, first_ + 2, table + " (count)",
                                         own_buckets_, bucket, &state.count));
  PlaceBuckets(&buckets_, &state.keys);
  PlaceBuckets(&buckets_, &state.last_step);
  PlaceBuckets(&buckets_, &state.count);
  const int64_t per_segment = piece.layout.buckets_per_segment();
  state.first_segment = piece.first_bucket / per_segment;
  state.num_segments = piece.num_buckets / per_segment;
  int next = first_ + 3;
  if (piece.policy.admission == Admission::kCount) {
    TF_RETURN_IF_ERROR(UnshardedView(
        ctx, locked, next++, table + " (sketch)", state.num_segments,
        {2, SegmentSketch::NumCells(piece.layout)}, &state.sketch));
    TF_RETURN_IF_ERROR(UnshardedView(ctx, locked, next++, table + " (seen)",
                                     state.num_segments, {}, &state.seen));
  }
  TF_RETURN_IF_ERROR(UnshardedView(ctx, locked, next, table + " (numbers)",
                                   kNumVocabularyNumbers, {}, &numbers_));
  int32_t number;
  TF_RETURN_IF_ERROR(NextVocabularyStep(table, numbers_, &number));
  step->last_step = number - 1;
  return View(*locked, piece, step);
}

}  // namespace layoutmap
