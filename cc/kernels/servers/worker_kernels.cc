// What a worker does in a step over servers: ids to requests, rows to
// activations, gradients to sums.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/engine/engine_config.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/engine/step.h"
#include "cc/core/servers/messages.h"
#include "cc/core/servers/worker_step.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/kernels/engine/batch_inputs.h"
#include "cc/kernels/engine/engine_config_reader.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/servers/plan_tensor.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/variant.h"

namespace layoutmap {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;

template <typename T>
absl::Status SetOutput(OpOutputList* outputs, int i,
                       const std::vector<T>& values) {
  Tensor* output = nullptr;
  TF_RETURN_IF_ERROR(outputs->allocate(
      i, TensorShape({static_cast<int64_t>(values.size())}), &output));
  std::copy(values.begin(), values.end(), output->flat<T>().data());
  return absl::OkStatus();
}

absl::Status CheckCount(const char* name, size_t expected, size_t received) {
  if (expected == received) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "`", name, "` must be ", expected, ". Received: ", received));
}

absl::Status GetFetched(OpKernelContext* ctx,
                        std::vector<Span<const float>>* fetched) {
  OpInputList list;
  TF_RETURN_IF_ERROR(ctx->input_list("fetched", &list));
  for (const Tensor& tensor : list) {
    TF_RETURN_IF_ERROR(CheckRank("fetched", tensor, 1));
    fetched->push_back(View<float>(tensor));
  }
  return absl::OkStatus();
}

template <typename Tid>
class PlanStepOp : public Kernel {
 public:
  explicit PlanStepOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    auto config = std::make_shared<ServersConfig>();
    OP_REQUIRES_OK(ctx, inputs_.Read(ctx));
    OP_REQUIRES_OK(ctx, ReadEngineConfig(ctx, &config->engine));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_servers", &config->num_servers));
    OP_REQUIRES_OK(ctx,
                   ctx->GetAttr("shard_servers", &config->server_of_shard));
    OP_REQUIRES_OK(ctx, ToTf(CheckServersConfig(*config)));
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
    OpOutputList requests;
    OP_REQUIRES_OK(ctx, ctx->output_list("requests", &requests));
    const std::vector<std::vector<uint32_t>> words = plan.step->FetchWords();
    for (size_t s = 0; s < words.size(); ++s) {
      OP_REQUIRES_OK(ctx, SetOutput(&requests, static_cast<int>(s), words[s]));
    }
    OP_REQUIRES_OK(
        ctx, SetScalar(ctx, "plan", tensorflow::Variant(std::move(plan))));
  }

 private:
  BatchInputs inputs_;
  std::shared_ptr<const ServersConfig> config_;
  // It only reads batches: no step of it begins.
  std::unique_ptr<HostEngine> engine_;
};

class CombineRowsOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    std::shared_ptr<const WorkerStep> step;
    std::vector<Span<const float>> fetched;
    OpOutputList outputs;
    OP_REQUIRES_OK(ctx, GetPlan(ctx, &step));
    OP_REQUIRES_OK(ctx, GetFetched(ctx, &fetched));
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
    OP_REQUIRES_OK(ctx,
                   ToTf(step->LookUp(fetched, RowKernelsFor(CurrentCpuLevel()),
                                     TfParallelFor(ctx), activations)));
  }
};

class FoldGradientsOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    std::shared_ptr<const WorkerStep> step;
    std::vector<Span<const float>> fetched;
    BatchGradients gradients;
    ClosureToken token;
    OpOutputList requests, values;
    OP_REQUIRES_OK(ctx, GetPlan(ctx, &step));
    OP_REQUIRES_OK(ctx, GetFetched(ctx, &fetched));
    OP_REQUIRES_OK(ctx, GetGradients(ctx, step->config().engine, &gradients));
    OP_REQUIRES_OK(ctx, GetToken(ctx, &token));
    OP_REQUIRES_OK(ctx, ctx->output_list("requests", &requests));
    OP_REQUIRES_OK(ctx, ctx->output_list("values", &values));
    std::vector<ServerMessage> messages;
    OP_REQUIRES_OK(ctx, ToTf(step->Fold(gradients, fetched, token,
                                        RowKernelsFor(CurrentCpuLevel()),
                                        TfParallelFor(ctx), &messages)));
    for (size_t s = 0; s < messages.size(); ++s) {
      const int i = static_cast<int>(s);
      OP_REQUIRES_OK(ctx, SetOutput(&requests, i, messages[s].words));
      OP_REQUIRES_OK(ctx, SetOutput(&values, i, messages[s].values));
    }
  }

 private:
  static absl::Status GetGradients(OpKernelContext* ctx,
                                   const EngineConfig& config,
                                   BatchGradients* gradients) {
    OpInputList features, hyperparameters;
    TF_RETURN_IF_ERROR(ctx->input_list("gradients", &features));
    TF_RETURN_IF_ERROR(ctx->input_list("hyperparameters", &hyperparameters));
    TF_RETURN_IF_ERROR(
        CheckCount("num_features", config.features.size(), features.size()));
    TF_RETURN_IF_ERROR(
        CheckCount("num_tables", config.tables.size(), hyperparameters.size()));
    for (const Tensor& gradient : features) {
      gradients->features.push_back(View<float>(gradient));
    }
    for (const Tensor& one : hyperparameters) {
      TF_RETURN_IF_ERROR(CheckRank("hyperparameters", one, 1));
      const Span<const float> values = View<float>(one);
      gradients->hyperparameters.emplace_back(values.begin(), values.end());
    }
    return absl::OkStatus();
  }

  static absl::Status GetToken(OpKernelContext* ctx, ClosureToken* token) {
    const Tensor* tensor;
    TF_RETURN_IF_ERROR(GetInput(ctx, "token", 1, &tensor));
    if (tensor->NumElements() != 3) {
      return absl::InvalidArgumentError(
          absl::StrCat("`token` must be epoch, number and attempt. Received: ",
                       tensor->NumElements(), " values"));
    }
    const auto values = tensor->vec<int64_t>();
    *token = {values(0), values(1), values(2)};
    return absl::OkStatus();
  }
};

LM_REGISTER_ID_KERNELS("PlanStep", PlanStepOp);
LM_REGISTER_KERNEL("CombineRows", CombineRowsOp);
LM_REGISTER_KERNEL("FoldGradients", FoldGradientsOp);

}  // namespace
}  // namespace layoutmap
