// A kernel that evicts the requested keys from a shard of a vocabulary.

#include <cstddef>
#include <cstdint>
#include <list>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/views.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/served_keys/evicted_rows.h"
#include "cc/core/served_keys/fetched_steps.h"
#include "cc/core/served_keys/key_pieces.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/core/vocabulary/admit_keys.h"
#include "cc/core/vocabulary/evict_keys.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "cc/kernels/servers/locked_key_piece.h"
#include "cc/kernels/servers/open_piece_views.h"
#include "cc/kernels/servers/pieces_op.h"
#include "cc/kernels/servers/server_resource.h"
#include "cc/kernels/vocabulary/locked_vocabulary.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"

namespace layoutmap {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

class EvictServerKeysOp : public Kernel {
 public:
  explicit EvictServerKeysOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("piece", &place_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("expired", &expired_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("only_check", &only_check_));
    OP_REQUIRES_OK(ctx, OneShard(FetchedSteps::kSize, &fetched_partition_));
  }

  void Run(OpKernelContext* ctx) override {
    ServerPtr server;
    OP_REQUIRES_OK(ctx, GetServer(ctx, &server));
    OP_REQUIRES_OK(ctx, RunOn(ctx, *server));
  }

 private:
  absl::Status RunOn(OpKernelContext* ctx, const ServerResource& server) {
    const Tensor* keys;
    TF_RETURN_IF_ERROR(ctx->input("keys", &keys));
    const std::vector<OpenPiece>& open = server.settings().open;
    size_t i = 0;
    while (i < open.size() && open[i].place != place_) ++i;
    if (i == open.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "`piece` must be a shard of an open table. Received: ", place_));
    }
    LockedShards locked;
    locked.Lock(server.variables().fetch_keys, LockedShards::Mode::kExclusive);
    TF_RETURN_IF_ERROR(server.CheckNotRetired());
    KeyPiece piece = open[i].piece;
    LockedKeyPiece view;
    KeyPieceStep state;
    TF_RETURN_IF_ERROR(
        view.Find(locked, FirstStateVariable(server, i), &piece));
    TF_RETURN_IF_ERROR(
        ViewOpenPiece(ctx, server, i, piece, &locked, &view, &state));
    ShardedView<int64_t> fetched;
    TF_RETURN_IF_ERROR(locked.MutableView(ctx, locked.size() - 2, kFetchedSteps,
                                          fetched_partition_, {}, &fetched));
    const FetchedSteps awaited(
        {fetched.shards[0], fetched_partition_.num_rows()});
    VocabularyStep step;
    step.number = state.last_step + 1;
    step.oldest_in_flight =
        static_cast<int32_t>(step.number - awaited.OldestAge());
    std::vector<KeyOfRow> evicted;
    TF_RETURN_IF_ERROR(
        Evict(piece, step, state, View<int64_t>(*keys), &evicted));
    std::list<EvictedBlock> blocks;
    std::vector<int64_t> rows;
    const absl::Status copied = CatchAllTf([&] {
      std::vector<int64_t> evicted_keys, at;
      for (const KeyOfRow& one : evicted) {
        evicted_keys.push_back(one.key);
        at.push_back(one.row);
        rows.push_back(one.row - piece.first_row());
      }
      TF_RETURN_IF_ERROR(SetVector<int64_t>(ctx, "evicted", evicted_keys));
      if (!only_check_ && !at.empty() &&
          server.records().keeps_evicted(place_)) {
        blocks.push_back(CopyEvicted(std::move(evicted_keys),
                                     Span<const int64_t>(at),
                                     state.first_rows));
      }
      return absl::OkStatus();
    });
    if (!copied.ok() || only_check_) TakeBackEvicted(evicted, state.state);
    if (!copied.ok() || only_check_) return copied;
    server.records().NoteChanged(place_, Span<const int64_t>(rows));
    server.records().evicted(place_).Add(std::move(blocks));
    VocabularyCounts counts;
    counts.num_evicted = static_cast<int64_t>(evicted.size());
    counts.num_expired = expired_ ? counts.num_evicted : 0;
    AddCounts(counts, view.numbers());
    return absl::OkStatus();
  }

  absl::Status Evict(const KeyPiece& piece, const VocabularyStep& step,
                     const KeyPieceStep& state, Span<const int64_t> keys,
                     std::vector<KeyOfRow>* evicted) const {
    if (expired_) {
      EvictExpired(piece.layout, piece.policy, step, state.state, evicted);
      return absl::OkStatus();
    }
    std::vector<int64_t> own;
    for (const int64_t key : keys) {
      const int64_t bucket = piece.layout.BucketOf(key) - piece.first_bucket;
      if (bucket >= 0 && bucket < piece.num_buckets) own.push_back(key);
    }
    return ToTf(EvictKeys(piece.layout, step, own, state.state, evicted));
  }

  int32_t place_ = 0;
  bool expired_ = false;
  bool only_check_ = false;
  RowPartition fetched_partition_;
};

LM_REGISTER_KERNEL("EvictServerKeys", EvictServerKeysOp);

}  // namespace
}  // namespace layoutmap
