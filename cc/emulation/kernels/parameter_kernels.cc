// Kernels that load and retrieve the tables of the emulated TPU. Each optimizer
// has one load op and one retrieve op.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/views.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/steps/engine_config.h"
#include "cc/emulation/emulated_engine.h"
#include "cc/emulation/kernels/tpu_system.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace layoutmap {
namespace {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Base class of load and retrieve kernels, which reads the attributes of the
// ops.
class ParametersOp : public Kernel {
 public:
  ParametersOp(OpKernelConstruction* ctx, Optimizer optimizer)
      : Kernel(ctx), optimizer_(optimizer) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table_id", &table_id_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table_name", &table_name_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_shards", &num_shards_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shard_id", &shard_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("config", &config_));
  }

 protected:
  absl::Status Find(EmulatedEnginePtr* engine, int32_t* table) const {
    TF_RETURN_IF_ERROR(TpuSystem::Get().EngineFor(config_, engine));
    TF_RETURN_IF_ERROR(
        ToTf((*engine)->FindTable(table_name_, table_id_, table)));
    return ToTf((*engine)->CheckShard(*table, optimizer_, shard_, num_shards_));
  }

  TensorShape ShapeIn(const EmulatedEngine& engine, int32_t table) const {
    const TableSpec& spec = engine.config().engine.tables[table];
    return TensorShape({spec.partition.shard_size(shard()), spec.dim});
  }

  int32_t shard() const { return static_cast<int32_t>(shard_); }

 private:
  const Optimizer optimizer_;
  int64_t table_id_;
  std::string table_name_;
  int64_t num_shards_;
  int64_t shard_;
  std::string config_;
};

template <Optimizer optimizer>
class LoadOp : public ParametersOp {
 public:
  explicit LoadOp(OpKernelConstruction* ctx) : ParametersOp(ctx, optimizer) {}

  void Run(OpKernelContext* ctx) override {
    EmulatedEnginePtr engine;
    int32_t table;
    OP_REQUIRES_OK(ctx, Find(&engine, &table));
    const TensorShape shape = ShapeIn(*engine, table);
    EmulatedEngine::ShardValues values;
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      OP_REQUIRES(ctx, ctx->input(i).shape() == shape,
                  absl::InvalidArgumentError(absl::StrCat(
                      "Table '", engine->config().engine.tables[table].name,
                      "': shard ", shard(), " must be ", shape.DebugString(),
                      ". Received: shape ", ctx->input(i).shape().DebugString(),
                      " (", ctx->op_kernel().name(), ", input ", i, ")")));
      values.push_back(View<float>(ctx->input(i)));
    }
    OP_REQUIRES_OK(
        ctx, ToTf(engine->Load(table, shard(), values, TfParallelFor(ctx))));
    engine->pending_calls().Changed();
  }
};

template <Optimizer optimizer>
class RetrieveOp : public ParametersOp {
 public:
  explicit RetrieveOp(OpKernelConstruction* ctx)
      : ParametersOp(ctx, optimizer) {}

  void Run(OpKernelContext* ctx) override {
    EmulatedEnginePtr engine;
    int32_t table;
    OP_REQUIRES_OK(ctx, Find(&engine, &table));
    const TensorShape shape = ShapeIn(*engine, table);
    std::vector<Span<float>> values;
    for (int i = 0; i < ctx->num_outputs(); ++i) {
      Tensor* out = nullptr;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(i, shape, &out));
      values.push_back(layoutmap::MutableView<float>(out));
    }
    OP_REQUIRES_OK(ctx, ToTf(engine->Retrieve(table, shard(), values,
                                              TfParallelFor(ctx))));
    engine->pending_calls().Changed();
  }
};

#define LM_REGISTER_PARAMETERS(name, optimizer)                          \
  REGISTER_KERNEL_BUILDER(                                               \
      Name("LoadTPUEmbedding" name "Parameters").Device(DEVICE_CPU),     \
      LoadOp<optimizer>);                                                \
  REGISTER_KERNEL_BUILDER(                                               \
      Name("RetrieveTPUEmbedding" name "Parameters").Device(DEVICE_CPU), \
      RetrieveOp<optimizer>)

LM_REGISTER_PARAMETERS("StochasticGradientDescent", Optimizer::kSgd);
LM_REGISTER_PARAMETERS("Adagrad", Optimizer::kAdagrad);
LM_REGISTER_PARAMETERS("AdagradMomentum", Optimizer::kAdagradMomentum);
LM_REGISTER_PARAMETERS("ADAM", Optimizer::kAdam);
LM_REGISTER_PARAMETERS("FTRL", Optimizer::kFtrl);

}  // namespace
}  // namespace layoutmap
