// Kernels that create a host engine from the attributes of the op.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/steps/engine_config.h"
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
    OP_REQUIRES_OK(ctx, ReadFirstRows(ctx));
    OP_REQUIRES_OK(
        ctx, ctx->GetAttr("table_vocabulary_buckets", &vocabulary_buckets_));
    OP_REQUIRES(ctx,
                vocabulary_buckets_.empty() ||
                    vocabulary_buckets_.size() == config_.tables.size(),
                absl::InvalidArgumentError(absl::StrCat(
                    "`table_vocabulary_buckets` must have one value for each "
                    "of the ",
                    config_.tables.size(), " tables, or be empty. Received: ",
                    vocabulary_buckets_.size())));
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
                                      new EngineResource(std::move(engine),
                                                         vocabulary_buckets_),
                                      ctx->device()->name())));
  }

 private:
  absl::Status ReadFirstRows(OpKernelConstruction* ctx) {
    std::vector<int64_t> first_rows;
    TF_RETURN_IF_ERROR(ctx->GetAttr("table_first_rows", &first_rows));
    if (!first_rows.empty() && first_rows.size() != config_.tables.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "`table_first_rows` must have one value for each of the ",
          config_.tables.size(),
          " tables, or be empty. Received: ", first_rows.size()));
    }
    for (size_t t = 0; t < first_rows.size(); ++t) {
      config_.tables[t].first_row = first_rows[t];
    }
    return absl::OkStatus();
  }

  EngineConfig config_;
  std::vector<int64_t> vocabulary_buckets_;
};

LM_REGISTER_KERNEL("CreateHostEngine", CreateHostEngineOp);

}  // namespace
}  // namespace layoutmap
