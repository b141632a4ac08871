// Kernels that report and reset the state of the host engine.

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "cc/core/engine/row_steps.h"
#include "cc/core/engine/token_steps.h"
#include "cc/core/steps/step.h"
#include "cc/kernels/engine/engine_resource.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"

namespace layoutmap {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;

class ResetHostEngineOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    EnginePtr engine;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &engine));
    engine->engine().Reset();
    engine->tokens().Reset();
    engine->row_steps().Reset();
  }
};

class RetireHostEngineOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    const Tensor* handle;
    EnginePtr engine;
    tensorflow::tstring why;
    OP_REQUIRES_OK(ctx, GetInput(ctx, "engine", 0, &handle));
    OP_REQUIRES_OK(ctx, GetScalar(ctx, "why", &why));
    OP_REQUIRES_OK(
        ctx, tensorflow::LookupResource(
                 ctx, handle->scalar<tensorflow::ResourceHandle>()(), &engine));
    // The engine is retired before the check, so that no step can begin after
    // the check.
    engine->Retire(why);
    if (why.empty() ||
        !(engine->engine().HasStepsInFlight() ||
          engine->tokens().IsApplying() || engine->row_steps().IsApplying())) {
      return;
    }
    engine->Retire("");
    OP_REQUIRES_OK(
        ctx, absl::FailedPreconditionError("Steps are in flight; finish them, "
                                           "or call `reset` to discard them"));
  }
};

class PassStepOp : public EngineOp {
 public:
  using EngineOp::EngineOp;

  absl::Status RunOn(OpKernelContext*, EngineResource& engine,
                     int32_t replica) override {
    std::shared_ptr<const Batch> batch;
    TF_RETURN_IF_ERROR(ToTf(engine.engine().BeginDequeue(replica, &batch)));
    engine.engine().FinishDequeue(replica, true);
    return absl::OkStatus();
  }
};

class DescribeHostEngineOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    EnginePtr engine;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &engine));
    const HostEngine::Description d = engine->engine().Describe();
    OP_REQUIRES_OK(ctx, SetVector<int64_t>(ctx, "pending", d.pending));
    OP_REQUIRES_OK(ctx, SetVector<bool>(ctx, "awaiting", d.awaiting));
    OP_REQUIRES_OK(ctx, SetScalar(ctx, "num_updates", d.num_updates));
    OP_REQUIRES_OK(ctx,
                   SetScalar<tensorflow::tstring>(ctx, "poisoned", d.poisoned));
    OP_REQUIRES_OK(ctx, SetScalar(ctx, "held", d.is_held));
    OP_REQUIRES_OK(ctx, SetFeatureCounts(ctx, d.features));
    OP_REQUIRES_OK(ctx, SetTableCounts(ctx, d.tables));
    const TokenSteps& tokens = engine->tokens();
    const RowSteps& row_steps = engine->row_steps();
    std::vector<int64_t> num_open = tokens.NumOpen();
    std::vector<int64_t> num_followed = tokens.NumFollowed();
    // Only engines with one replica have row steps.
    num_open[0] += row_steps.NumOpen();
    num_followed[0] += row_steps.NumRecorded();
    OP_REQUIRES_OK(ctx, SetVector<int64_t>(ctx, "num_open", num_open));
    OP_REQUIRES_OK(ctx, SetVector<int64_t>(ctx, "num_followed", num_followed));
  }

 private:
  static absl::Status SetFeatureCounts(
      OpKernelContext* ctx,
      const std::vector<HostEngine::FeatureCounts>& features) {
    const auto num_features = static_cast<int64_t>(features.size());
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(
        ctx->allocate_output("feature_counts", {num_features, 5}, &out));
    auto rows = out->matrix<int64_t>();
    for (int64_t f = 0; f < num_features; ++f) {
      rows(f, 0) = features[f].num_samples;
      rows(f, 1) = features[f].ids.num_ids;
      rows(f, 2) = features[f].ids.num_dropped;
      rows(f, 3) = features[f].ids.num_clipped;
      rows(f, 4) = features[f].ids.num_truncated;
    }
    return absl::OkStatus();
  }

  static absl::Status SetTableCounts(
      OpKernelContext* ctx,
      const std::vector<HostEngine::TableCounts>& tables) {
    const auto num_tables = static_cast<int64_t>(tables.size());
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(
        ctx->allocate_output("table_counts", {num_tables, 2}, &out));
    auto rows = out->matrix<int64_t>();
    for (int64_t t = 0; t < num_tables; ++t) {
      rows(t, 0) = tables[t].num_lookups;
      rows(t, 1) = tables[t].num_unique_rows;
    }
    return absl::OkStatus();
  }
};

LM_REGISTER_KERNEL("PassStep", PassStepOp);
LM_REGISTER_KERNEL("ResetHostEngine", ResetHostEngineOp);
LM_REGISTER_KERNEL("RetireHostEngine", RetireHostEngineOp);
LM_REGISTER_KERNEL("DescribeHostEngine", DescribeHostEngineOp);

}  // namespace
}  // namespace layoutmap
