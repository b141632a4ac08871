// Kernels that find the rows of keys or assign rows to new keys, and then pass
// the batches to the host engine.

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/engine/row_steps.h"
#include "cc/core/engine/token_steps.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/steps/step.h"
#include "cc/kernels/engine/engine_resource.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/vocabulary/keys_op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace layoutmap {
namespace {

using tensorflow::OpKernelContext;

class EnqueueKeysOp : public KeysOp {
 public:
  using KeysOp::KeysOp;

  void Run(OpKernelContext* ctx) override {
    EnginePtr resource;
    bool training;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &resource));
    OP_REQUIRES_OK(ctx, GetScalar(ctx, "training", &training));
    HostEngine& engine = resource->engine();
    const int32_t num_replicas = engine.config().num_replicas;
    for (int32_t r = 0; r < num_replicas; ++r) {
      OP_REQUIRES_OK(ctx, ToTf(engine.CheckEnqueue(r, training)));
    }
    OP_REQUIRES_OK(
        ctx,
        FindRows(
            ctx, *resource, num_replicas, training,
            [&](const std::vector<std::shared_ptr<const Batch>>& batches,
                std::function<Status()>* forget) {
              for (int32_t r = 0; r < num_replicas; ++r) {
                TF_RETURN_IF_ERROR(ToTf(engine.EnqueueBatch(
                    r, training, Status(), batches[r], TfParallelFor(ctx))));
              }
              // The function has weak pointers to the batches, because a shared
              // pointer to a batch would mark its rows as in use.
              *forget = [&engine,
                         kept = std::vector<std::weak_ptr<const Batch>>(
                             batches.begin(), batches.end())] {
                std::vector<std::shared_ptr<const Batch>> step;
                for (const auto& batch : kept) {
                  step.push_back(batch.lock());
                }
                return engine.TakeBackStep(step);
              };
              return absl::OkStatus();
            }));
  }
};

class OpenKeysOp : public KeysOp {
 public:
  using KeysOp::KeysOp;

  void Run(OpKernelContext* ctx) override {
    EnginePtr resource;
    int32_t replica;
    int64_t token = 0;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &resource));
    OP_REQUIRES_OK(ctx, GetScalar(ctx, "replica", &replica));
    const int32_t num_replicas = resource->engine().config().num_replicas;
    OP_REQUIRES(ctx, replica >= 0 && replica < num_replicas,
                absl::InvalidArgumentError(
                    absl::StrCat("`replica` must be in [0, ", num_replicas,
                                 "). Received: ", replica)));
    OP_REQUIRES_OK(
        ctx,
        FindRows(ctx, *resource, 1, true,
                 [&](const std::vector<std::shared_ptr<const Batch>>& batches,
                     std::function<Status()>* forget) {
                   TokenSteps& tokens = resource->tokens();
                   TF_RETURN_IF_ERROR(
                       ToTf(tokens.Open(replica, batches[0], &token)));
                   *forget = [&tokens, replica, token] {
                     return tokens.TakeBack(replica, token);
                   };
                   return absl::OkStatus();
                 }));
    OP_REQUIRES_OK(ctx, SetScalar(ctx, "token", token));
  }
};

class OpenRowsOp : public KeysOp {
 public:
  using KeysOp::KeysOp;

  void Run(OpKernelContext* ctx) override {
    EnginePtr resource;
    int64_t token = 0;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &resource));
    const EngineConfig& config = resource->engine().config();
    OP_REQUIRES(ctx, config.num_replicas == 1 && config.features.size() == 1,
                absl::InvalidArgumentError(absl::StrCat(
                    "The engine must have one replica and one feature. "
                    "Received: ",
                    config.num_replicas, " replicas and ",
                    config.features.size(), " features")));
    OP_REQUIRES_OK(
        ctx,
        FindRows(ctx, *resource, 1, true,
                 [&](const std::vector<std::shared_ptr<const Batch>>& batches,
                     std::function<Status()>* forget) {
                   TF_RETURN_IF_ERROR(SetRows(ctx, (*batches[0])[0]));
                   RowSteps& steps = resource->row_steps();
                   TF_RETURN_IF_ERROR(ToTf(steps.Open(batches[0], &token)));
                   *forget = [&steps, token] { return steps.TakeBack(token); };
                   return absl::OkStatus();
                 }));
    OP_REQUIRES_OK(ctx, SetScalar(ctx, "token", token));
  }

 private:
  // Sets the output `rows` to the row of each sample, or to -1.
  static absl::Status SetRows(OpKernelContext* ctx, const RaggedIds& ids) {
    const Span<const int64_t> splits = ids.splits();
    const Span<const uint32_t> rows = ids.rows();
    tensorflow::Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(
        "rows", tensorflow::TensorShape({ids.num_samples()}), &out));
    auto row_of = out->vec<int64_t>();
    for (int64_t s = 0; s < ids.num_samples(); ++s) {
      const int64_t size = splits[s + 1] - splits[s];
      if (size > 1) {
        return absl::InvalidArgumentError(
            absl::StrCat("A sample must have at most one key. Received: ", size,
                         " keys in sample ", s));
      }
      row_of(s) = size == 0 ? -1 : int64_t{rows[splits[s]]};
    }
    return absl::OkStatus();
  }
};

LM_REGISTER_KERNEL("EnqueueKeys", EnqueueKeysOp);
LM_REGISTER_KERNEL("OpenRows", OpenRowsOp);
LM_REGISTER_KERNEL("OpenKeys", OpenKeysOp);

}  // namespace
}  // namespace layoutmap
