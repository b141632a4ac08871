// Kernels that compute the initial values of a table and write them to huge
// pages.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/parallel_for.h"
#include "cc/core/memory/huge_pages.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/tensor_util.h"
#include "tensorflow/core/kernels/random_op_cpu.h"
#include "tensorflow/core/kernels/random_ops_util.h"
#include "tensorflow/core/lib/random/random_distributions.h"

namespace layoutmap {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::random::NormalDistribution;
using tensorflow::random::PhiloxRandom;
using tensorflow::random::SingleSampleAdapter;
using tensorflow::random::TruncatedNormalDistribution;
using tensorflow::random::UniformDistribution;

// Number of values that are drawn at a time. They are scaled while they are
// still in the first-level cache.
constexpr int64_t kTile = 2048;

// Total number of bytes that the `NewRows` ops of this process have written.
std::atomic<int64_t> bytes_drawn{0};

void CountDrawn(int64_t bytes) {
  bytes_drawn.fetch_add(bytes, std::memory_order_relaxed);
}

// Draws `size` random numbers, multiplies them by `factor` and adds `offset`. A
// distribution generates groups of numbers. The groups are independent of each
// other and can be generated in parallel.
template <typename Distribution, typename T>
void Draw(const PhiloxRandom& generator, T factor, T offset, T* data,
          int64_t size, const ParallelFor& parallel_for) {
  using Task = tensorflow::functor::FillPhiloxRandomTask<
      Distribution, Distribution::kVariableSamplesPerOutput>;
  constexpr int64_t kGroup = Distribution::kResultElementCount;
  constexpr int64_t kGroupsPerTile = kTile / kGroup;
  const int64_t num_groups = (size + kGroup - 1) / kGroup;
  parallel_for(num_groups, kGroup + Distribution::kElementCost,
               [&](int64_t begin, int64_t end) {
                 for (int64_t g = begin; g < end; g += kGroupsPerTile) {
                   const int64_t last = std::min(g + kGroupsPerTile, end);
                   Task::Run(generator, data, size, g, last, Distribution());
                   const int64_t stop = std::min(last * kGroup, size);
                   for (int64_t i = g * kGroup; i < stop; ++i) {
                     // The product and the sum are rounded separately, so that
                     // the result equals the result of two TensorFlow ops.
                     const T scaled = data[i] * factor;
                     data[i] = scaled + offset;
                   }
                   CountDrawn((stop - g * kGroup) * sizeof(T));
                 }
               });
}

template <typename T>
class NewRowsOp : public Kernel {
 public:
  explicit NewRowsOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("distribution", &distribution_));
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor *sizes, *generator;
    T factor, offset;
    OP_REQUIRES_OK(ctx, ctx->input("shape", &sizes));
    TensorShape shape;
    OP_REQUIRES_OK(ctx, tensorflow::tensor::MakeShape(*sizes, &shape));
    OP_REQUIRES_OK(ctx, GetInput(ctx, "generator", 1, &generator));
    OP_REQUIRES(ctx, generator->NumElements() == 3,
                absl::InvalidArgumentError(
                    absl::StrCat("`generator` must be a counter of two numbers "
                                 "and a key. Received: ",
                                 generator->NumElements(), " numbers")));
    OP_REQUIRES_OK(ctx, GetScalar(ctx, "factor", &factor));
    OP_REQUIRES_OK(ctx, GetScalar(ctx, "offset", &offset));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("output", shape, &output));
    AdviseHugePages(output->data(), output->TotalBytes());

    T* const data = output->flat<T>().data();
    const int64_t size = output->NumElements();
    const ParallelFor parallel_for = TfParallelFor(ctx);
    const uint64_t* words = generator->flat<uint64_t>().data();
    const PhiloxRandom philox =
        tensorflow::GetPhiloxRandomFromCounterKeyMem(words, words + 2);
    if (distribution_ == "uniform") {
      Draw<UniformDistribution<PhiloxRandom, T>>(philox, factor, offset, data,
                                                 size, parallel_for);
    } else if (distribution_ == "normal") {
      Draw<NormalDistribution<PhiloxRandom, T>>(philox, factor, offset, data,
                                                size, parallel_for);
    } else if (distribution_ == "truncated_normal") {
      Draw<TruncatedNormalDistribution<SingleSampleAdapter<PhiloxRandom>, T>>(
          philox, factor, offset, data, size, parallel_for);
    } else {
      parallel_for(size, 1, [&](int64_t begin, int64_t end) {
        std::fill(data + begin, data + end, offset);
        CountDrawn((end - begin) * sizeof(T));
      });
    }
  }

 private:
  std::string distribution_;
};

class BytesDrawnOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    Tensor* size = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("size", TensorShape({}), &size));
    size->scalar<int64_t>()() = bytes_drawn.load(std::memory_order_relaxed);
  }
};

REGISTER_KERNEL_BUILDER(
    Name("LayoutMap>BytesDrawn").Device(tensorflow::DEVICE_CPU), BytesDrawnOp);

#define REGISTER_NEW_ROWS(type)                               \
  REGISTER_KERNEL_BUILDER(Name("LayoutMap>NewRows")           \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<type>("dtype"), \
                          NewRowsOp<type>)
REGISTER_NEW_ROWS(Eigen::half);
REGISTER_NEW_ROWS(Eigen::bfloat16);
REGISTER_NEW_ROWS(float);
REGISTER_NEW_ROWS(double);
#undef REGISTER_NEW_ROWS

}  // namespace
}  // namespace layoutmap
