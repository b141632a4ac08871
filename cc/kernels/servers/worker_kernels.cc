// Kernels that a worker runs for parameter server steps. They compute requests
// from ids, activations from rows, and updates from gradients.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/servers/messages.h"
#include "cc/core/servers/worker_step.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/gradient_coordinates.h"
#include "cc/core/steps/step.h"
#include "cc/kernels/engine/batch_inputs.h"
#include "cc/kernels/engine/engine_config_reader.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/servers/aligned_bytes.h"
#include "cc/kernels/servers/plan_tensor.h"
#include "cc/kernels/servers/worker_messages.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/framework/variant.h"

namespace layoutmap {
namespace {

using tensorflow::DataType;
using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;

template <typename Tid>
class PlanStepOp : public Kernel {
 public:
  explicit PlanStepOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    auto config = std::make_shared<ServersConfig>();
    OP_REQUIRES_OK(ctx, inputs_.Read(ctx));
    OP_REQUIRES_OK(ctx, ReadServersConfig(ctx, config.get()));
    OP_REQUIRES_OK(ctx, ToTf(HostEngine::Make(config->engine, &engine_)));
    config_ = std::move(config);
  }

  void Run(OpKernelContext* ctx) override {
    std::shared_ptr<const Batch> batch;
    Status made;
    OP_REQUIRES_OK(ctx, inputs_.MakeBatch<Tid>(ctx, *engine_, &batch, &made));
    OP_REQUIRES_OK(ctx, ToTf(made));
    PlanTensor plan = {
        WorkerStep::Make(config_, std::move(batch), TfParallelFor(ctx))};
    Requests requests;
    OP_REQUIRES_OK(ctx, requests.Get(ctx));
    OP_REQUIRES_OK(ctx,
                   requests.Result(plan.step->Request(requests.allocate())));
    OP_REQUIRES_OK(
        ctx, SetScalar(ctx, "plan", tensorflow::Variant(std::move(plan))));
  }

 private:
  BatchInputs inputs_;
  std::shared_ptr<const ServersConfig> config_;
  // The engine only checks batches and runs no steps.
  std::unique_ptr<HostEngine> engine_;
};

class CombineRowsOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    std::shared_ptr<const WorkerStep> step;
    Fetched fetched;
    OpOutputList outputs;
    OP_REQUIRES_OK(ctx, GetPlan(ctx, &step));
    OP_REQUIRES_OK(ctx, fetched.Get(ctx));
    OP_REQUIRES_OK(ctx, ctx->output_list("activations", &outputs));
    const EngineConfig& config = step->config().engine;
    const Batch& batch = step->batch();
    OP_REQUIRES_OK(ctx,
                   CheckCount("num_features", batch.size(), outputs.size()));
    std::vector<float*> activations;
    for (size_t f = 0; f < batch.size(); ++f) {
      TensorShape shape({batch[f].num_samples()});
      const int64_t length = config.features[f].max_sequence_length;
      if (length > 0) OP_REQUIRES_OK(ctx, shape.AddDimWithStatus(length));
      OP_REQUIRES_OK(ctx, shape.AddDimWithStatus(config.dim_of_feature(f)));
      Tensor* output = nullptr;
      OP_REQUIRES_OK(ctx,
                     outputs.allocate(static_cast<int>(f), shape, &output));
      activations.push_back(output->flat<float>().data());
    }
    OP_REQUIRES_OK(ctx, ToTf(step->LookUp(fetched.bytes(),
                                          RowKernelsFor(CurrentCpuLevel()),
                                          TfParallelFor(ctx), activations)));
  }
};

class FoldGradientsOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    std::shared_ptr<const WorkerStep> step;
    Fetched fetched;
    BatchGradients gradients;
    ClosureToken token;
    Requests requests;
    OP_REQUIRES_OK(ctx, GetPlan(ctx, &step));
    OP_REQUIRES_OK(ctx, fetched.Get(ctx));
    OP_REQUIRES_OK(ctx, GetGradients(ctx, step->config().engine, &gradients));
    OP_REQUIRES_OK(ctx, GetToken(ctx, &token));
    OP_REQUIRES_OK(ctx, requests.GetWithNext(ctx));
    OP_REQUIRES_OK(ctx, CheckCount("num_servers", step->config().num_servers,
                                   requests.size()));
    OP_REQUIRES_OK(ctx, requests.Result(step->Fold(
                            gradients, fetched.bytes(), token,
                            RowKernelsFor(CurrentCpuLevel()),
                            TfParallelFor(ctx), requests.allocate())));
  }

 private:
  static absl::Status GetGradients(OpKernelContext* ctx,
                                   const EngineConfig& config,
                                   BatchGradients* gradients) {
    OpInputList hyperparameters;
    TF_RETURN_IF_ERROR(GetFeatureGradients(ctx, config, gradients));
    TF_RETURN_IF_ERROR(ctx->input_list("hyperparameters", &hyperparameters));
    TF_RETURN_IF_ERROR(
        CheckCount("num_tables", config.tables.size(), hyperparameters.size()));
    for (const Tensor& one : hyperparameters) {
      TF_RETURN_IF_ERROR(CheckRank("hyperparameters", one, 1));
      const Span<const float> values = View<float>(one);
      gradients->hyperparameters.emplace_back(values.begin(), values.end());
    }
    return absl::OkStatus();
  }
};

class GradientCoordinatesOp : public Kernel {
 public:
  explicit GradientCoordinatesOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_gradients", &num_gradients_));
  }

  void Run(OpKernelContext* ctx) override {
    std::shared_ptr<const WorkerStep> step;
    OpInputList values;
    OP_REQUIRES_OK(ctx, GetPlan(ctx, &step));
    OP_REQUIRES_OK(ctx, ctx->input_list("gradients", &values));
    const EngineConfig& config = step->config().engine;
    const size_t num_features = config.features.size();
    OP_REQUIRES_OK(ctx, CheckCount("num_values", num_gradients_ * num_features,
                                   values.size()));
    std::vector<BatchGradients> gradients(num_gradients_);
    for (int i = 0; i < values.size(); ++i) {
      gradients[i / num_features].features.push_back(View<float>(values[i]));
    }
    for (const BatchGradients& one : gradients) {
      OP_REQUIRES_OK(ctx, ToTf(CheckGradients(config, step->batch(), one)));
    }
    OP_REQUIRES_OK(ctx, SetVector<float>(ctx, "coordinates",
                                         GradientCoordinates(
                                             config, step->batch(), gradients,
                                             TfParallelFor(ctx))));
  }

 private:
  int num_gradients_;
};

class BundleRequestsOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    OpInputList list;
    OP_REQUIRES_OK(ctx, ctx->input_list("requests", &list));
    std::vector<Span<const uint8_t>> requests;
    for (const Tensor& one : list) {
      OP_REQUIRES_OK(ctx, CheckRank("requests", one, 1));
      requests.push_back(View<uint8_t>(one));
    }
    Tensor* bundle = nullptr;
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(
                 "bundle", TensorShape({BundleBytes(requests)}), &bundle));
    WriteBundle(requests, bundle->flat<uint8_t>().data());
  }
};

LM_REGISTER_ID_KERNELS("PlanStep", PlanStepOp);
LM_REGISTER_KERNEL("CombineRows", CombineRowsOp);
LM_REGISTER_KERNEL("FoldGradients", FoldGradientsOp);
LM_REGISTER_KERNEL("GradientCoordinates", GradientCoordinatesOp);
LM_REGISTER_KERNEL("BundleRequests", BundleRequestsOp);

}  // namespace
}  // namespace layoutmap
