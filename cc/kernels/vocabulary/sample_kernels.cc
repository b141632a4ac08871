// Kernels that read the counts of keys, and that sample keys. Both kernels only
// read the variables of the vocabulary.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/memory/raw_array.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/vocabulary/sample_keys.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "cc/kernels/vocabulary/locked_vocabulary.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace layoutmap {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Base class of both kernels, which locks and reads the counts.
class CountedKeysOp : public Kernel {
 public:
  explicit CountedKeysOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table", &table_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("first_bucket", &first_bucket_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("half_life_steps", &half_life_steps_));
  }

 protected:
  // The counts of the shards, whose locks are held.
  struct Locked {
    LockedShards shards;
    RowPartition buckets;
    CountedKeys counted;
  };

  // Locks all variables, so that a concurrent step cannot assign a row to
  // another key between the reads of its key and its count.
  absl::Status Lock(OpKernelContext* ctx, Locked* locked) const {
    OpInputList lanes;
    TF_RETURN_IF_ERROR(
        GetPartition(ctx, Placement::kOffsets, &locked->buckets));
    TF_RETURN_IF_ERROR(ctx->input_list("lanes", &lanes));
    const int num_shards = locked->buckets.num_shards();
    TF_RETURN_IF_ERROR(
        CheckNumVariables(absl::StrCat("Vocabulary '", table_, "' needs"),
                          "lanes", 3 * num_shards, lanes.size()));
    LockedShards& shards = locked->shards;
    TF_RETURN_IF_ERROR(
        shards.Lock(ctx, {"lanes", "numbers"}, LockedShards::Mode::kShared));
    CountedKeys& counted = locked->counted;
    const TensorShape bucket({kKeysPerBucket});
    TF_RETURN_IF_ERROR(shards.View(0, table_ + " (keys)", locked->buckets,
                                   bucket, &counted.keys));
    TF_RETURN_IF_ERROR(shards.View(num_shards, table_ + " (last_step)",
                                   locked->buckets, bucket,
                                   &counted.last_step));
    TF_RETURN_IF_ERROR(shards.View(2 * num_shards, table_ + " (count)",
                                   locked->buckets, bucket, &counted.count));
    RowPartition whole;
    const std::vector<int64_t> offsets = {0, kNumVocabularyNumbers};
    TF_RETURN_IF_ERROR(
        ToTf(RowPartition::Make(Placement::kOffsets, offsets, &whole)));
    ShardedView<const int64_t> numbers;
    TF_RETURN_IF_ERROR(shards.View(3 * num_shards, table_ + " (numbers)", whole,
                                   TensorShape({}), &numbers));
    counted.first_bucket = first_bucket_;
    counted.step = static_cast<int32_t>(numbers.shards[0][kVocabularyStep]);
    counted.policy.half_life_steps = half_life_steps_;
    return absl::OkStatus();
  }

  std::string table_;
  int64_t first_bucket_;
  int32_t half_life_steps_;
};

class CountKeysOp : public CountedKeysOp {
 public:
  explicit CountKeysOp(OpKernelConstruction* ctx) : CountedKeysOp(ctx) {
    int64_t num_buckets;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("vocabulary_buckets", &num_buckets));
    OP_REQUIRES_OK(ctx, ToTf(BucketLayout::Make(num_buckets, &layout_)));
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor* keys;
    Locked locked;
    OP_REQUIRES_OK(ctx, ctx->input("keys", &keys));
    OP_REQUIRES_OK(ctx, Lock(ctx, &locked));
    const int64_t end = first_bucket_ + locked.buckets.num_rows();
    OP_REQUIRES(ctx, first_bucket_ >= 0 && end <= layout_.num_buckets(),
                absl::InvalidArgumentError(absl::StrCat(
                    "The shards must be in a vocabulary of ",
                    layout_.num_buckets(), " buckets. Received: buckets [",
                    first_bucket_, ", ", end, ") (table '", table_, "')")));
    Tensor* counts = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("counts", keys->shape(), &counts));
    CountKeys(layout_, locked.counted, View<int64_t>(*keys), TfParallelFor(ctx),
              MutableView<int64_t>(counts));
  }

 private:
  BucketLayout layout_;
};

class SampleKeysOp : public CountedKeysOp {
 public:
  explicit SampleKeysOp(OpKernelConstruction* ctx) : CountedKeysOp(ctx) {
    std::string by;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("by", &by));
    by_ = by == "count" ? SampleBy::kCount : SampleBy::kUniform;
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor* seed;
    int64_t num_sampled;
    OP_REQUIRES_OK(ctx, GetScalar(ctx, "num_sampled", &num_sampled));
    OP_REQUIRES(ctx, num_sampled >= 0,
                absl::InvalidArgumentError(absl::StrCat(
                    "`num_sampled` must be at least 0. Received: ", num_sampled,
                    " (table '", table_, "')")));
    OP_REQUIRES_OK(ctx, GetInput(ctx, "seed", 1, &seed));
    OP_REQUIRES(ctx, seed->NumElements() == 2,
                absl::InvalidArgumentError(absl::StrCat(
                    "`seed` must have two values. Received: shape ",
                    seed->shape().DebugString(), " (table '", table_, "')")));
    const auto seeds = seed->vec<int64_t>();
    Locked locked;
    OP_REQUIRES_OK(ctx, Lock(ctx, &locked));
    RawArray<int64_t> keys(num_sampled), rows(num_sampled),
        weights(num_sampled);
    const int64_t total = SampleKeys(
        locked.counted, by_,
        {static_cast<uint64_t>(seeds(0)), static_cast<uint64_t>(seeds(1))},
        TfParallelFor(ctx), keys, rows, weights);
    const int64_t num_found = total > 0 ? num_sampled : 0;
    OP_REQUIRES_OK(ctx, SetValues(ctx, "keys", keys, num_found));
    OP_REQUIRES_OK(ctx, SetValues(ctx, "rows", rows, num_found));
    OP_REQUIRES_OK(ctx, SetValues(ctx, "weights", weights, num_found));
    OP_REQUIRES_OK(ctx, SetScalar<int64_t>(ctx, "total", total));
  }

 private:
  static absl::Status SetValues(OpKernelContext* ctx, const char* name,
                                const RawArray<int64_t>& values, int64_t size) {
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(
        ctx->allocate_output(name, TensorShape({size}), &output));
    std::copy_n(values.data(), size, output->flat<int64_t>().data());
    return absl::OkStatus();
  }

  SampleBy by_;
};

LM_REGISTER_KERNEL("CountKeys", CountKeysOp);
LM_REGISTER_KERNEL("SampleKeys", SampleKeysOp);

}  // namespace
}  // namespace layoutmap
