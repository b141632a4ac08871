// What is asked of one vocabulary outside of the engine's steps.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/find_keys.h"
#include "cc/core/keys/first_values.h"
#include "cc/core/keys/policy.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/core/vocabulary/admit_keys.h"
#include "cc/core/vocabulary/evict_keys.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "cc/kernels/vocabulary/locked_vocabulary.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"

namespace layoutmap {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

class FindKeysOp : public Kernel {
 public:
  explicit FindKeysOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table", &table_));
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor* keys;
    RowPartition buckets;
    BucketLayout layout;
    OP_REQUIRES_OK(ctx, ctx->input("keys", &keys));
    OP_REQUIRES_OK(ctx, GetPartition(ctx, Placement::kOffsets, &buckets));
    OP_REQUIRES_OK(ctx, ToTf(BucketLayout::Make(buckets.num_rows(), &layout)));
    LockedShards locked;
    OP_REQUIRES_OK(ctx,
                   locked.Lock(ctx, {"shards"}, LockedShards::Mode::kShared));
    ShardedView<const int64_t> stored;
    OP_REQUIRES_OK(ctx, locked.View(0, table_ + " (keys)", buckets,
                                    {kKeysPerBucket}, &stored));
    Tensor* rows = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("rows", keys->shape(), &rows));
    FindKeys(layout, stored, View<int64_t>(*keys), TfParallelFor(ctx),
             MutableView<int64_t>(rows));
  }

 private:
  std::string table_;
};

// An op that changes a vocabulary.
class ChangeOp : public Kernel {
 public:
  explicit ChangeOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    std::string admission, evict;
    std::vector<int64_t> numbers;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table", &table_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("admission", &admission));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("evict", &evict));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("policy", &numbers));
    OP_REQUIRES_OK(ctx, ReadPolicy(admission, evict, numbers, 0, &policy_));
  }

 protected:
  absl::Status LockState(OpKernelContext* ctx, LockedShards* locked,
                         LockedVocabulary* vocabulary) const {
    RowPartition buckets;
    TF_RETURN_IF_ERROR(GetPartition(ctx, Placement::kOffsets, &buckets));
    TF_RETURN_IF_ERROR(
        locked->Lock(ctx, {"state"}, LockedShards::Mode::kExclusive));
    return vocabulary->Make(ctx, locked, 0, table_, buckets.offsets(), policy_);
  }

 private:
  std::string table_;
  VocabularyPolicy policy_;
};

class EvictKeysOp : public ChangeOp {
 public:
  explicit EvictKeysOp(OpKernelConstruction* ctx) : ChangeOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("expired", &expired_));
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor *keys, *pinned_rows;
    VocabularyStep step;
    OP_REQUIRES_OK(ctx, ctx->input("keys", &keys));
    OP_REQUIRES_OK(ctx, GetInput(ctx, "pinned_rows", 1, &pinned_rows));
    OP_REQUIRES_OK(ctx, GetScalar(ctx, "oldest_step", &step.oldest_in_flight));
    LockedShards locked;
    LockedVocabulary vocabulary;
    OP_REQUIRES_OK(ctx, LockState(ctx, &locked, &vocabulary));
    OP_REQUIRES_OK(ctx, vocabulary.NextStep(&step.number));
    std::vector<int64_t> pinned(View<int64_t>(*pinned_rows).begin(),
                                View<int64_t>(*pinned_rows).end());
    std::sort(pinned.begin(), pinned.end());
    step.pinned_rows = pinned;
    std::vector<KeyOfRow> evicted;
    if (expired_) {
      EvictExpired(vocabulary.layout(), vocabulary.policy(), step,
                   vocabulary.state(), &evicted);
    } else {
      OP_REQUIRES_OK(
          ctx, ToTf(EvictKeys(vocabulary.layout(), step, View<int64_t>(*keys),
                              vocabulary.state(), &evicted)));
    }
    const auto num_evicted = static_cast<int64_t>(evicted.size());
    vocabulary.CountEvicted(num_evicted, expired_ ? num_evicted : 0);
    std::vector<int64_t> gone, rows;
    for (const KeyOfRow& one : evicted) {
      gone.push_back(one.key);
      rows.push_back(one.row);
    }
    OP_REQUIRES_OK(ctx, SetVector<int64_t>(ctx, "evicted", gone));
    OP_REQUIRES_OK(ctx, SetVector<int64_t>(ctx, "rows", rows));
  }

 private:
  bool expired_;
};

class FirstRowsOp : public Kernel {
 public:
  explicit FirstRowsOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    std::string kind;
    std::vector<float> limits;
    int64_t seed;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("kind", &kind));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("limits", &limits));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("seed", &seed));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dim", &dim_));
    OP_REQUIRES(ctx, limits.size() == 2,
                absl::InvalidArgumentError(absl::StrCat(
                    "`limits` must be two. Received: ", limits.size())));
    OP_REQUIRES_OK(ctx, ToTf(ParseFirstValues(kind, &values_.kind)));
    values_.a = limits[0];
    values_.b = limits[1];
    values_.seed = static_cast<uint64_t>(seed);
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor* keys;
    OP_REQUIRES_OK(ctx, ctx->input("keys", &keys));
    tensorflow::TensorShape shape = keys->shape();
    OP_REQUIRES_OK(ctx, shape.AddDimWithStatus(dim_));
    Tensor* rows = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("rows", shape, &rows));
    float* out = rows->flat<float>().data();
    const Span<const int64_t> of = View<int64_t>(*keys);
    TfParallelFor(ctx)(
        of.size(), 20 * dim_ + 20, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            FillFirstValues(values_, of[i], {out + i * dim_, dim_});
          }
        });
  }

 private:
  FirstValues values_;
  int64_t dim_;
};

LM_REGISTER_KERNEL("FindKeys", FindKeysOp);
LM_REGISTER_KERNEL("EvictKeys", EvictKeysOp);
LM_REGISTER_KERNEL("FirstRows", FirstRowsOp);

}  // namespace
}  // namespace layoutmap
