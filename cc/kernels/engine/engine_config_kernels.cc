// Makes a host engine from the attrs of its op.

#include <memory>
#include <utility>

#include "cc/core/engine/engine_config.h"
#include "cc/core/engine/host_engine.h"
#include "cc/kernels/engine/engine_config_reader.h"
#include "cc/kernels/engine/engine_resource.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/resource_handle.h"

namespace layoutmap {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::ResourceHandle;

class CreateHostEngineOp : public Kernel {
 public:
  explicit CreateHostEngineOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadEngineConfig(ctx, &config_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_replicas", &config_.num_replicas));
    OP_REQUIRES_OK(
        ctx, ctx->GetAttr("max_pending_steps", &config_.max_pending_steps));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("pipelined", &config_.is_pipelined));
  }

  void Run(OpKernelContext* ctx) override {
    std::unique_ptr<HostEngine> engine;
    OP_REQUIRES_OK(ctx, ToTf(HostEngine::Make(config_, &engine)));
    OP_REQUIRES_OK(ctx, SetScalar(ctx, "engine",
                                  ResourceHandle::MakeRefCountingHandle(
                                      new EngineResource(std::move(engine)),
                                      ctx->device()->name())));
  }

 private:
  EngineConfig config_;
};

LM_REGISTER_KERNEL("CreateHostEngine", CreateHostEngineOp);

}  // namespace
}  // namespace layoutmap
