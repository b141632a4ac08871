// Kernels that draw the same uniform random numbers as TensorFlow's own
// kernels.

#define EIGEN_USE_THREADS

#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/tensor_util.h"
#include "tensorflow/core/kernels/random_op_cpu.h"
#include "tensorflow/core/lib/random/random_distributions.h"
#include "tensorflow/core/util/guarded_philox_random.h"

namespace layoutmap {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::random::PhiloxRandom;
using tensorflow::random::UniformDistribution;

// Number of samples that a generator skips per output value after each call.
// TensorFlow's kernels use the same number.
constexpr int kSamplesPerOutput = 256;

class RandomKernel : public Kernel {
 public:
  explicit RandomKernel(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, generator_.Init(ctx));
  }

 protected:
  template <typename T>
  void Draw(OpKernelContext* ctx, UniformDistribution<PhiloxRandom, T> dist) {
    const Tensor* sizes;
    OP_REQUIRES_OK(ctx, ctx->input("shape", &sizes));
    TensorShape shape;
    OP_REQUIRES_OK(ctx, tensorflow::tensor::MakeShape(*sizes, &shape));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("output", shape, &output));
    auto values = output->flat<T>();
    using Distribution = UniformDistribution<PhiloxRandom, T>;
    tensorflow::functor::FillPhiloxRandom<Eigen::ThreadPoolDevice,
                                          Distribution>()(
        ctx, ctx->eigen_device<Eigen::ThreadPoolDevice>(), nullptr, nullptr,
        generator_.ReserveRandomOutputs(values.size(), kSamplesPerOutput),
        values.data(), values.size(), dist);
  }

 private:
  tensorflow::GuardedPhiloxRandom generator_;
};

template <typename T>
class RandomUniformOp : public RandomKernel {
 public:
  using RandomKernel::RandomKernel;

  void Run(OpKernelContext* ctx) override {
    Draw<T>(ctx, UniformDistribution<PhiloxRandom, T>());
  }
};

template <typename T>
class RandomUniformIntOp : public RandomKernel {
 public:
  using RandomKernel::RandomKernel;

  void Run(OpKernelContext* ctx) override {
    T limits[2];
    for (int i = 0; i < 2; ++i) {
      const Tensor& limit = ctx->input(i + 1);
      OP_REQUIRES(ctx, limit.dims() == 0,
                  absl::InvalidArgumentError(
                      absl::StrCat(i == 0 ? "`minval`" : "`maxval`",
                                   " must be a scalar. Received: shape ",
                                   limit.shape().DebugString())));
      limits[i] = limit.scalar<T>()();
    }
    OP_REQUIRES(ctx, limits[0] < limits[1],
                absl::InvalidArgumentError(absl::StrCat(
                    "`maxval` must be greater than `minval`. Received: minval=",
                    limits[0], ", maxval=", limits[1])));
    Draw<T>(ctx, UniformDistribution<PhiloxRandom, T>(limits[0], limits[1]));
  }
};

#define REGISTER_UNIFORM(type)                                \
  REGISTER_KERNEL_BUILDER(Name("LayoutMap>RandomUniform")     \
                              .Device(tensorflow::DEVICE_CPU) \
                              .HostMemory("shape")            \
                              .TypeConstraint<type>("dtype"), \
                          RandomUniformOp<type>)
REGISTER_UNIFORM(Eigen::half);
REGISTER_UNIFORM(Eigen::bfloat16);
REGISTER_UNIFORM(float);
REGISTER_UNIFORM(double);
#undef REGISTER_UNIFORM

#define REGISTER_UNIFORM_INT(type)                            \
  REGISTER_KERNEL_BUILDER(Name("LayoutMap>RandomUniformInt")  \
                              .Device(tensorflow::DEVICE_CPU) \
                              .HostMemory("shape")            \
                              .TypeConstraint<type>("Tout"),  \
                          RandomUniformIntOp<type>)
REGISTER_UNIFORM_INT(int32_t);
REGISTER_UNIFORM_INT(int64_t);
#undef REGISTER_UNIFORM_INT

}  // namespace
}  // namespace layoutmap
