// Kernels for the dot products of features and for their gradient.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/views.h"
#include "cc/core/interactions/dot_interaction.h"
#include "cc/core/simd/dot_kernels.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace layoutmap {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Base class of both kernels, which reads the attributes and the features.
class InteractionKernel : public Kernel {
 public:
  explicit InteractionKernel(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("self_interaction", &self_interaction_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("skip_gather", &skip_gather_));
  }

 protected:
  struct Features {
    TensorShape shape;
    DotLayout layout;
    std::vector<const float*> data;
  };

  absl::Status ReadFeatures(OpKernelContext* ctx, Features* features) const {
    OpInputList tensors;
    TF_RETURN_IF_ERROR(ctx->input_list("features", &tensors));
    TF_RETURN_IF_ERROR(CheckRank("features", tensors[0], 2));
    features->shape = tensors[0].shape();
    for (int i = 0; i < tensors.size(); ++i) {
      if (tensors[i].shape() != features->shape) {
        return absl::InvalidArgumentError(absl::StrCat(
            "All tensors of `features` must have the same shape. Received: "
            "shape ",
            features->shape.DebugString(), " at index 0, shape ",
            tensors[i].shape().DebugString(), " at index ", i));
      }
      features->data.push_back(tensors[i].flat<float>().data());
    }
    features->layout = {tensors.size(), tensors[0].dim_size(1),
                        self_interaction_, skip_gather_};
    return absl::OkStatus();
  }

 private:
  bool self_interaction_;
  bool skip_gather_;
};

class DotInteractionOp : public InteractionKernel {
 public:
  using InteractionKernel::InteractionKernel;

  void Run(OpKernelContext* ctx) override {
    Features features;
    OP_REQUIRES_OK(ctx, ReadFeatures(ctx, &features));
    const int64_t num_samples = features.shape.dim_size(0);
    TensorShape shape({num_samples});
    OP_REQUIRES_OK(ctx, shape.AddDimWithStatus(features.layout.num_outputs()));
    Tensor* products = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("products", shape, &products));
    if (shape.num_elements() == 0) return;
    DotInteraction(features.layout, features.data, num_samples,
                   DotKernelsFor(CurrentCpuLevel()), TfParallelFor(ctx),
                   products->flat<float>().data());
  }
};

class DotInteractionGradOp : public InteractionKernel {
 public:
  using InteractionKernel::InteractionKernel;

  void Run(OpKernelContext* ctx) override {
    Features features;
    OP_REQUIRES_OK(ctx, ReadFeatures(ctx, &features));
    const int64_t num_samples = features.shape.dim_size(0);
    const Tensor* gradients;
    OP_REQUIRES_OK(ctx, GetInput(ctx, "gradients", 2, &gradients));
    OP_REQUIRES(
        ctx,
        gradients->dim_size(0) == num_samples &&
            gradients->dim_size(1) == features.layout.num_outputs(),
        absl::InvalidArgumentError(absl::StrCat(
            "`gradients` must have one row per sample and one column per "
            "product, shape [",
            num_samples, ",", features.layout.num_outputs(),
            "]. Received: shape ", gradients->shape().DebugString())));
    OpOutputList outputs;
    OP_REQUIRES_OK(ctx, ctx->output_list("feature_gradients", &outputs));
    std::vector<float*> out;
    for (int i = 0; i < outputs.size(); ++i) {
      Tensor* output = nullptr;
      OP_REQUIRES_OK(ctx, outputs.allocate(i, features.shape, &output));
      out.push_back(output->flat<float>().data());
    }
    if (features.shape.num_elements() == 0) return;
    DotInteractionGrad(
        features.layout, features.data, gradients->flat<float>().data(),
        num_samples, DotKernelsFor(CurrentCpuLevel()), TfParallelFor(ctx), out);
  }
};

LM_REGISTER_KERNEL("DotInteraction", DotInteractionOp);
LM_REGISTER_KERNEL("DotInteractionGrad", DotInteractionGradOp);

}  // namespace
}  // namespace layoutmap
