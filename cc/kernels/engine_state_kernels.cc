// Where the host engine is, and how to make it forget.

#include <algorithm>
#include <memory>

#include "cc/kernels/engine_resource.h"

namespace layoutmap {
namespace {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class ResetHostEngineOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    EnginePtr engine;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &engine));
    engine->engine().Reset();
    engine->tokens().Reset();
  }
};

class PassStepOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    EnginePtr engine;
    int32_t replica;
    std::shared_ptr<const Batch> batch;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &engine));
    OP_REQUIRES_OK(ctx, GetReplica(ctx, &replica));
    OP_REQUIRES_OK(ctx, ToTf(engine->engine().BeginDequeue(replica, &batch)));
    engine->engine().FinishDequeue(replica, true);
  }
};

class DescribeHostEngineOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    enum {
      kPending,
      kAwaiting,
      kNumUpdates,
      kPoisoned,
      kIsHeld,
      kFeatureCounts,
      kTableCounts,
      kNumOpen,
      kNumFollowed
    };
    EnginePtr engine;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &engine));
    const HostEngine::Description d = engine->engine().Describe();
    OP_REQUIRES_OK(ctx, SetOutput(ctx, kPending, d.pending));
    const TensorShape by_replica({static_cast<int64_t>(d.awaiting.size())});
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(kAwaiting, by_replica, &out));
    std::copy(d.awaiting.begin(), d.awaiting.end(), out->flat<bool>().data());
    OP_REQUIRES_OK(ctx, ctx->allocate_output(kNumUpdates, {}, &out));
    out->scalar<int64_t>()() = d.num_updates;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(kPoisoned, {}, &out));
    out->scalar<tensorflow::tstring>()() = d.poisoned;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(kIsHeld, {}, &out));
    out->scalar<bool>()() = d.is_held;
    const auto num_features = static_cast<int64_t>(d.features.size());
    const auto num_tables = static_cast<int64_t>(d.tables.size());
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(kFeatureCounts, {num_features, 5}, &out));
    auto features = out->matrix<int64_t>();
    for (int64_t f = 0; f < num_features; ++f) {
      const HostEngine::FeatureCounts& counts = d.features[f];
      features(f, 0) = counts.num_samples;
      features(f, 1) = counts.ids.num_ids;
      features(f, 2) = counts.ids.num_dropped;
      features(f, 3) = counts.ids.num_clipped;
      features(f, 4) = counts.ids.num_truncated;
    }
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(kTableCounts, {num_tables, 2}, &out));
    auto tables = out->matrix<int64_t>();
    for (int64_t t = 0; t < num_tables; ++t) {
      tables(t, 0) = d.tables[t].num_lookups;
      tables(t, 1) = d.tables[t].num_unique_rows;
    }
    OP_REQUIRES_OK(ctx, SetOutput(ctx, kNumOpen, engine->tokens().NumOpen()));
    OP_REQUIRES_OK(
        ctx, SetOutput(ctx, kNumFollowed, engine->tokens().NumFollowed()));
  }
};

REGISTER_KERNEL_BUILDER(Name("LayoutMap>PassStep").Device(DEVICE_CPU),
                        PassStepOp);
REGISTER_KERNEL_BUILDER(Name("LayoutMap>ResetHostEngine").Device(DEVICE_CPU),
                        ResetHostEngineOp);
REGISTER_KERNEL_BUILDER(Name("LayoutMap>DescribeHostEngine").Device(DEVICE_CPU),
                        DescribeHostEngineOp);

}  // namespace
}  // namespace layoutmap
