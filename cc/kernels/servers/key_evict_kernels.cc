// A kernel that evicts the requested keys from a shard of a vocabulary. If
// several tables share the vocabulary, they lose the rows of the keys, too.

#include <cstddef>
#include <cstdint>
#include <deque>
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
  // A locked shard of a table.
  struct Shard {
    int place = 0;
    KeyPiece piece;
    LockedKeyPiece view;
    KeyPieceStep state;
    std::list<EvictedBlock> blocks;
  };

  absl::Status RunOn(OpKernelContext* ctx, const ServerResource& server) {
    const Tensor* keys;
    TF_RETURN_IF_ERROR(ctx->input("keys", &keys));
    const std::vector<OpenPiece>& open = server.settings().open;
    size_t i = 0;
    while (i < open.size() && open[i].place != place_) ++i;
    if (i == open.size() || !open[i].piece.is_owner()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "`piece` must be a shard of a table that owns an open vocabulary. "
          "Received: ",
          place_));
    }
    LockedShards locked;
    locked.Lock(server.variables().fetch_keys, LockedShards::Mode::kExclusive);
    TF_RETURN_IF_ERROR(server.CheckNotRetired());
    std::deque<Shard> shards;
    TF_RETURN_IF_ERROR(ViewShards(ctx, server, i, &locked, &shards));
    const KeyPiece& piece = shards[0].piece;
    const KeyPieceStep& state = shards[0].state;
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
    std::vector<int64_t> rows;
    const absl::Status copied = CatchAllTf([&] {
      std::vector<int64_t> evicted_keys, at;
      for (const KeyOfRow& one : evicted) {
        evicted_keys.push_back(one.key);
        at.push_back(one.row);
        rows.push_back(one.row - piece.first_row());
      }
      TF_RETURN_IF_ERROR(SetVector<int64_t>(ctx, "evicted", evicted_keys));
      if (only_check_ || at.empty()) return absl::OkStatus();
      for (Shard& one : shards) {
        if (!server.records().keeps_evicted(one.place)) continue;
        one.blocks.push_back(CopyEvicted(evicted_keys, Span<const int64_t>(at),
                                         one.state.first_rows));
      }
      return absl::OkStatus();
    });
    if (!copied.ok() || only_check_) TakeBackEvicted(evicted, state.state);
    if (!copied.ok() || only_check_) return copied;
    // The rows of other tables with the vocabulary do not change.
    server.records().NoteChanged(place_, Span<const int64_t>(rows));
    for (Shard& one : shards) {
      server.records().evicted(one.place).Add(std::move(one.blocks));
    }
    VocabularyCounts counts;
    counts.num_evicted = static_cast<int64_t>(evicted.size());
    counts.num_expired = expired_ ? counts.num_evicted : 0;
    AddCounts(counts, shards[0].view.numbers());
    return absl::OkStatus();
  }

  // Sets `shards` to the open shard `i`, which owns a vocabulary, and to the
  // other shards with this vocabulary.
  static absl::Status ViewShards(OpKernelContext* ctx,
                                 const ServerResource& server, size_t i,
                                 LockedShards* locked,
                                 std::deque<Shard>* shards) {
    const std::vector<OpenPiece>& open = server.settings().open;
    std::vector<size_t> sharing = {i};
    for (size_t j = 0; j < open.size(); ++j) {
      if (open[j].piece.owner == static_cast<int32_t>(i)) sharing.push_back(j);
    }
    for (const size_t j : sharing) {
      Shard& one = shards->emplace_back();
      one.place = open[j].place;
      one.piece = open[j].piece;
      TF_RETURN_IF_ERROR(
          one.view.Find(*locked, open[j].first_state, &one.piece));
      TF_RETURN_IF_ERROR(ViewOpenPiece(ctx, server, j, one.piece, locked,
                                       &one.view, &one.state));
    }
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
