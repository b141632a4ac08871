// A kernel that evicts the requested keys from a shard of a vocabulary.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/served_keys/fetched_steps.h"
#include "cc/core/served_keys/key_pieces.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/core/vocabulary/admit_keys.h"
#include "cc/core/vocabulary/evict_keys.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "cc/kernels/servers/locked_key_piece.h"
#include "cc/kernels/servers/pieces_op.h"
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
    std::string admission, evict;
    std::vector<int64_t> numbers;
    int64_t num_buckets;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table", &piece_.table));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("first_bucket", &piece_.first_bucket));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("vocabulary_buckets", &num_buckets));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("admission", &admission));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("evict", &evict));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("policy", &numbers));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("expired", &expired_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("only_check", &only_check_));
    OP_REQUIRES_OK(ctx,
                   ReadPolicy(admission, evict, numbers, 0, &piece_.policy));
    OP_REQUIRES_OK(ctx, ToTf(BucketLayout::Make(num_buckets, &piece_.layout)));
    OP_REQUIRES_OK(ctx, OneShard(FetchedSteps::kSize, &fetched_partition_));
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor* keys;
    OP_REQUIRES_OK(ctx, ctx->input("keys", &keys));
    LockedShards locked;
    OP_REQUIRES_OK(ctx, locked.Lock(ctx, {"state", "fetched_steps"},
                                    LockedShards::Mode::kExclusive));
    OP_REQUIRES_OK(ctx, CheckNumVariables("The keys of a shard need", "state",
                                          LockedKeyPiece::NumVariables(piece_),
                                          locked.size() - 1));
    KeyPiece piece = piece_;
    LockedKeyPiece view;
    KeyPieceStep state;
    OP_REQUIRES_OK(ctx, view.Find(locked, 0, &piece));
    OP_REQUIRES_OK(ctx, view.MutableView(ctx, &locked, piece, &state));
    ShardedView<int64_t> fetched;
    OP_REQUIRES_OK(ctx,
                   locked.MutableView(ctx, locked.size() - 1, kFetchedSteps,
                                      fetched_partition_, {}, &fetched));
    const FetchedSteps awaited(
        {fetched.shards[0], fetched_partition_.num_rows()});
    VocabularyStep step;
    step.number = state.last_step + 1;
    step.oldest_in_flight =
        static_cast<int32_t>(step.number - awaited.OldestAge());
    std::vector<KeyOfRow> evicted;
    OP_REQUIRES_OK(ctx,
                   Evict(piece, step, state, View<int64_t>(*keys), &evicted));
    std::vector<int64_t> evicted_keys;
    for (const KeyOfRow& one : evicted) evicted_keys.push_back(one.key);
    const absl::Status output_status =
        SetVector<int64_t>(ctx, "evicted", evicted_keys);
    if (!output_status.ok() || only_check_)
      TakeBackEvicted(evicted, state.state);
    OP_REQUIRES_OK(ctx, output_status);
    if (only_check_) return;
    VocabularyCounts counts;
    counts.num_evicted = static_cast<int64_t>(evicted.size());
    counts.num_expired = expired_ ? counts.num_evicted : 0;
    AddCounts(counts, view.numbers());
  }

 private:
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

  KeyPiece piece_;
  bool expired_ = false;
  bool only_check_ = false;
  RowPartition fetched_partition_;
};

LM_REGISTER_KERNEL("EvictServerKeys", EvictServerKeysOp);

}  // namespace
}  // namespace layoutmap
