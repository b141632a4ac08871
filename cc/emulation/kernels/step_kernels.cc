// Kernels for TensorFlow's ops that enqueue batches, receive activations and
// send gradients.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/status.h"
#include "cc/core/ids/combiner.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/steps/step.h"
#include "cc/emulation/config/tpu_config.h"
#include "cc/emulation/core_batch.h"
#include "cc/emulation/kernels/tpu_system.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace layoutmap {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::DEVICE_CPU;
using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;

std::vector<int64_t> ToInt64(const Tensor& tensor) {
  if (tensor.dtype() == tensorflow::DT_INT64) {
    const auto flat = tensor.flat<int64_t>();
    return {flat.data(), flat.data() + flat.size()};
  }
  const auto flat = tensor.flat<int32_t>();
  return {flat.data(), flat.data() + flat.size()};
}

std::vector<float> ToFloat(const Tensor& tensor) {
  if (tensor.dtype() == tensorflow::DT_DOUBLE) {
    const auto flat = tensor.flat<double>();
    return {flat.data(), flat.data() + flat.size()};
  }
  const auto flat = tensor.flat<float>();
  return {flat.data(), flat.data() + flat.size()};
}

class EnqueueOp : public AsyncOpKernel {
 public:
  explicit EnqueueOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    is_dynamic_ = !ctx->HasAttr("device_ordinal");
    if (!is_dynamic_) {
      OP_REQUIRES_OK(ctx, ctx->GetAttr("device_ordinal", &core_));
    }
    std::vector<std::string> names;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("combiners", &names));
    for (const std::string& name : names) {
      Combiner combiner;
      OP_REQUIRES_OK(ctx, ToTf(ParseCombiner(name, &combiner)));
      combiners_.push_back(combiner);
    }
    for (const char* name : {"T1", "T2"}) {
      tensorflow::DataType dtype;
      OP_REQUIRES_OK(ctx, ctx->GetAttr(name, &dtype));
      OP_REQUIRES(
          ctx, dtype == tensorflow::DT_INT32 || dtype == tensorflow::DT_INT64,
          absl::InvalidArgumentError(
              absl::StrCat(name, " must be int32 or int64. Received: ",
                           tensorflow::DataTypeString(dtype))));
    }
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    EmulatedEnginePtr engine;
    bool training = false;
    int32_t core = core_;
    OP_REQUIRES_OK_ASYNC(ctx, TpuSystem::Get().EngineFor("", &engine), done);
    OP_REQUIRES_OK_ASYNC(ctx, ReadMode(ctx, &training), done);
    OP_REQUIRES_OK_ASYNC(ctx, ReadCore(ctx, &core), done);
    auto batch = std::make_shared<Batch>();
    Status made;
    OP_REQUIRES_OK_ASYNC(ctx, CatchAllTf([&] {
                           return MakeBatch(ctx, engine->config(), batch.get(),
                                            &made);
                         }),
                         done);
    const int64_t ticket = engine->TakeEnqueueTicket(core);
    RunWhenReady(
        ctx, std::move(done), engine, absl::StrCat("`enqueue` of core ", core),
        [=, parallel_for = TfParallelFor(ctx)](absl::Status*) {
          return engine->Enqueue(core, ticket, training, made, batch,
                                 parallel_for);
        },
        [=] { engine->ReturnEnqueueTicket(core, ticket); });
  }

 private:
  static absl::Status ReadMode(OpKernelContext* ctx, bool* training) {
    const Tensor* mode;
    TF_RETURN_IF_ERROR(ctx->input("mode_override", &mode));
    TF_RETURN_IF_ERROR(CheckRank("mode_override", *mode, 0));
    const std::string name(mode->scalar<tensorflow::tstring>()());
    *training = name == "train" || name == "unspecified";
    if (*training || name == "inference") return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("`mode_override` must be one of train, inference, "
                     "unspecified. Received: ",
                     name));
  }

  absl::Status ReadCore(OpKernelContext* ctx, int32_t* core) const {
    if (is_dynamic_) {
      const Tensor* ordinal;
      TF_RETURN_IF_ERROR(ctx->input("device_ordinal", &ordinal));
      TF_RETURN_IF_ERROR(CheckRank("device_ordinal", *ordinal, 0));
      *core = ordinal->scalar<int32_t>()();
    }
    // In `strategy.run`, the op has no attribute with the index of its core.
    // The device of the op determines the core.
    if (*core < 0) *core = CoreOf(ctx);
    return absl::OkStatus();
  }

  absl::Status MakeBatch(OpKernelContext* ctx, const TpuConfig& config,
                         Batch* batch, Status* made) const {
    OpInputList locations, ids, weights;
    TF_RETURN_IF_ERROR(
        ctx->input_list("sample_indices_or_row_splits", &locations));
    TF_RETURN_IF_ERROR(ctx->input_list("embedding_indices", &ids));
    TF_RETURN_IF_ERROR(ctx->input_list("aggregation_weights", &weights));
    const size_t num_features = config.engine.features.size();
    if (static_cast<size_t>(ids.size()) != num_features ||
        combiners_.size() != config.engine.tables.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "The embedding has ", num_features, " features and ",
          config.engine.tables.size(), " tables. Received: ", ids.size(),
          " features and ", combiners_.size(), " combiners"));
    }
    batch->resize(num_features);
    for (size_t f = 0; f < num_features && made->ok(); ++f) {
      const int i = static_cast<int>(f);
      TF_RETURN_IF_ERROR(CheckRank("embedding_indices", ids[i], 1));
      TF_RETURN_IF_ERROR(CheckRank("aggregation_weights", weights[i], 1));
      if (locations[i].dims() != 1 &&
          (locations[i].dims() != 2 || locations[i].dim_size(1) < 2)) {
        return absl::InvalidArgumentError(absl::StrCat(
            "`sample_indices_or_row_splits` must be row_splits of rank 1, or "
            "indices of rank 2 with at least two columns. Received: shape ",
            locations[i].shape().DebugString()));
      }
      *made = ids[i].dtype() == tensorflow::DT_INT64
                  ? MakeIds<int64_t>(config, f, locations[i], ids[i],
                                     weights[i], &(*batch)[f])
                  : MakeIds<int32_t>(config, f, locations[i], ids[i],
                                     weights[i], &(*batch)[f]);
    }
    return absl::OkStatus();
  }

  template <typename Tid>
  Status MakeIds(const TpuConfig& config, size_t f, const Tensor& locations,
                 const Tensor& ids, const Tensor& weights,
                 RaggedIds* made) const {
    const std::vector<int64_t> places = ToInt64(locations);
    const std::vector<float> factors = ToFloat(weights);
    CoreInput<Tid> input;
    input.num_columns = locations.dims() == 2 ? locations.dim_size(1) : 0;
    input.locations = places;
    input.ids = View<Tid>(ids);
    input.weights = factors;
    return MakeCoreIds(config, f, combiners_[config.engine.table_of_feature[f]],
                       input, made);
  }

  bool is_dynamic_ = false;
  int32_t core_ = -1;
  // One combiner per table.
  std::vector<Combiner> combiners_;
};

// Computes the shape of a feature's activations, [d0, d1, ..., dim].
absl::Status ActivationShape(const TpuConfig& config, size_t f,
                             TensorShape* shape) {
  for (const int64_t size : config.output_shapes[f]) {
    TF_RETURN_IF_ERROR(shape->AddDimWithStatus(size));
  }
  return shape->AddDimWithStatus(config.engine.dim_of_feature(f));
}

class ReceiveOp : public AsyncOpKernel {
 public:
  explicit ReceiveOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("config", &config_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    EmulatedEnginePtr engine;
    OP_REQUIRES_OK_ASYNC(ctx, TpuSystem::Get().EngineFor(config_, &engine),
                         done);
    const int32_t core = CoreOf(ctx);
    RunWhenReady(ctx, std::move(done), engine,
                 absl::StrCat("`dequeue` of core ", core),
                 [=, parallel_for = TfParallelFor(ctx)](absl::Status* status) {
                   const auto allocate = [&](std::vector<float*>* activations) {
                     *status = Allocate(ctx, engine->config(), activations);
                     return status->ok() ? Status() : InvalidArgument("");
                   };
                   return engine->Receive(core, allocate, parallel_for);
                 });
  }

 private:
  static absl::Status Allocate(OpKernelContext* ctx, const TpuConfig& config,
                               std::vector<float*>* activations) {
    OpOutputList outputs;
    TF_RETURN_IF_ERROR(ctx->output_list("outputs", &outputs));
    const size_t num_features = config.output_shapes.size();
    if (static_cast<size_t>(outputs.size()) != num_features) {
      return absl::InvalidArgumentError(
          absl::StrCat("The embedding has ", num_features,
                       " features. Received: num_outputs ", outputs.size()));
    }
    for (size_t f = 0; f < num_features; ++f) {
      TensorShape shape;
      TF_RETURN_IF_ERROR(ActivationShape(config, f, &shape));
      Tensor* out = nullptr;
      TF_RETURN_IF_ERROR(outputs.allocate(static_cast<int>(f), shape, &out));
      activations->push_back(out->flat<float>().data());
    }
    return absl::OkStatus();
  }

  std::string config_;
};

class SendOp : public AsyncOpKernel {
 public:
  explicit SendOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("config", &config_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    EmulatedEnginePtr engine;
    OP_REQUIRES_OK_ASYNC(ctx, TpuSystem::Get().EngineFor(config_, &engine),
                         done);
    BatchGradients gradients;
    auto rates = std::make_shared<std::vector<float>>();
    OP_REQUIRES_OK_ASYNC(
        ctx, ReadInputs(ctx, engine->config(), &gradients, rates.get()), done);
    const int32_t core = CoreOf(ctx);
    RunWhenReady(ctx, std::move(done), engine,
                 absl::StrCat("`apply_gradients` of core ", core),
                 [=, parallel_for = TfParallelFor(ctx)](absl::Status*) {
                   return engine->Send(core, gradients, *rates, parallel_for);
                 });
  }

 private:
  static absl::Status ReadInputs(OpKernelContext* ctx, const TpuConfig& config,
                                 BatchGradients* gradients,
                                 std::vector<float>* rates) {
    OpInputList inputs, learning_rates;
    TF_RETURN_IF_ERROR(ctx->input_list("inputs", &inputs));
    TF_RETURN_IF_ERROR(ctx->input_list("learning_rates", &learning_rates));
    const int num_features = static_cast<int>(config.output_shapes.size());
    auto tensors = std::make_shared<std::vector<Tensor>>();
    for (int f = 0; f < inputs.size(); ++f) {
      TensorShape expected;
      if (f < num_features) {
        TF_RETURN_IF_ERROR(ActivationShape(config, f, &expected));
      }
      if (f < num_features && inputs[f].shape() != expected) {
        return absl::InvalidArgumentError(
            absl::StrCat("Feature '", config.engine.features[f].feature,
                         "': its gradient must be shaped like its activation, ",
                         expected.DebugString(), ". Received: shape ",
                         inputs[f].shape().DebugString()));
      }
      tensors->push_back(inputs[f]);
      gradients->features.push_back(View<float>(inputs[f]));
    }
    gradients->keep_alive = std::move(tensors);
    for (const Tensor& rate : learning_rates) {
      TF_RETURN_IF_ERROR(CheckRank("learning_rates", rate, 0));
      rates->push_back(rate.scalar<float>()());
    }
    return absl::OkStatus();
  }

  std::string config_;
};

REGISTER_KERNEL_BUILDER(
    Name("EnqueueTPUEmbeddingArbitraryTensorBatch").Device(DEVICE_CPU),
    EnqueueOp);
REGISTER_KERNEL_BUILDER(
    Name("DynamicEnqueueTPUEmbeddingArbitraryTensorBatch").Device(DEVICE_CPU),
    EnqueueOp);
REGISTER_KERNEL_BUILDER(Name("RecvTPUEmbeddingActivations").Device(DEVICE_CPU),
                        ReceiveOp);
REGISTER_KERNEL_BUILDER(Name("SendTPUEmbeddingGradients").Device(DEVICE_CPU),
                        SendOp);

}  // namespace
}  // namespace layoutmap
