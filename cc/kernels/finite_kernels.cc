// Kernel of a check for NaN and infinity.

#include <cstdint>
#include <vector>

#include "cc/core/base/all_finite.h"
#include "cc/core/base/views.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace layoutmap {
namespace {

class AllFiniteOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(tensorflow::OpKernelContext* ctx) override {
    tensorflow::OpInputList tensors;
    OP_REQUIRES_OK(ctx, ctx->input_list("tensors", &tensors));
    std::vector<Span<const float>> arrays;
    for (const tensorflow::Tensor& tensor : tensors) {
      arrays.push_back({tensor.flat<float>().data(), tensor.NumElements()});
    }
    tensorflow::Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("all_finite", {}, &out));
    out->scalar<bool>()() = AllFinite(arrays, TfParallelFor(ctx));
  }
};

LM_REGISTER_KERNEL("AllFinite", AllFiniteOp);

}  // namespace
}  // namespace layoutmap
