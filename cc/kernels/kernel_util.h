// Between TensorFlow and the core: statuses, threads, tables.

#ifndef TF_LAYOUTMAP_KERNELS_KERNEL_UTIL_H_
#define TF_LAYOUTMAP_KERNELS_KERNEL_UTIL_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "cc/core/base/catch_all.h"
#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/simd/row_kernels.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace layoutmap {

absl::Status ToTf(const Status& status);

// What `run` returns, or what it throws as a status.
template <typename Run>
absl::Status CatchAllTf(const Run& run) {
  try {
    return run();
  } catch (...) {
    return ToTf(StatusOfException());
  }
}

// What all our kernels are: sizes come from outside, and one that no memory
// holds is an error of the call, not the end of the process.
class Kernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* ctx) final;

 protected:
  virtual void Run(tensorflow::OpKernelContext* ctx) = 0;
};

// The device's intra-op threads, and how many they are.
ParallelFor TfParallelFor(tensorflow::OpKernelContext* ctx);
int NumWorkers(tensorflow::OpKernelContext* ctx);

template <typename T>
Span<const T> View(const tensorflow::Tensor& tensor) {
  auto flat = tensor.flat<T>();
  return {flat.data(), static_cast<int64_t>(flat.size())};
}

template <typename T>
Span<T> MutableView(tensorflow::Tensor* tensor) {
  auto flat = tensor->flat<T>();
  return {flat.data(), static_cast<int64_t>(flat.size())};
}

// Inputs and outputs go by the names that the op's definition in cc/ops gives
// them, never by a number, so that their order is said there alone.

// Fails unless the tensor has this rank; `name` is the op's input.
absl::Status CheckRank(const char* name, const tensorflow::Tensor& tensor,
                       int rank);

// The input `name`, which must have this rank.
absl::Status GetInput(tensorflow::OpKernelContext* ctx, const char* name,
                      int rank, const tensorflow::Tensor** tensor);

// The value of the scalar input `name`.
template <typename T>
absl::Status GetScalar(tensorflow::OpKernelContext* ctx, const char* name,
                       T* value) {
  const tensorflow::Tensor* tensor;
  TF_RETURN_IF_ERROR(GetInput(ctx, name, 0, &tensor));
  *value = tensor->scalar<T>()();
  return absl::OkStatus();
}

// Sets the output `name` to a scalar.
template <typename T>
absl::Status SetScalar(tensorflow::OpKernelContext* ctx, const char* name,
                       const T& value) {
  tensorflow::Tensor* output = nullptr;
  TF_RETURN_IF_ERROR(
      ctx->allocate_output(name, tensorflow::TensorShape({}), &output));
  output->scalar<T>()() = value;
  return absl::OkStatus();
}

// Sets the output `name` to a vector, whose values may be of another type.
template <typename T, typename U>
absl::Status SetVector(tensorflow::OpKernelContext* ctx, const char* name,
                       const std::vector<U>& values) {
  tensorflow::Tensor* output = nullptr;
  const auto size = static_cast<int64_t>(values.size());
  TF_RETURN_IF_ERROR(
      ctx->allocate_output(name, tensorflow::TensorShape({size}), &output));
  std::copy(values.begin(), values.end(), output->flat<T>().data());
  return absl::OkStatus();
}

// The attrs `placement` and `optimizer`.
absl::Status GetPlacement(tensorflow::OpKernelConstruction* ctx,
                          Placement* placement);
absl::Status GetOptimizer(tensorflow::OpKernelConstruction* ctx,
                          Optimizer* optimizer);

// The input `offsets` with a placement as a partition.
absl::Status GetPartition(tensorflow::OpKernelContext* ctx, Placement placement,
                          RowPartition* partition);

}  // namespace layoutmap

// Registers a kernel of ours for CPUs, by its op's name without "LayoutMap>".
#define LM_REGISTER_KERNEL(name, Kernel) \
  REGISTER_KERNEL_BUILDER(               \
      Name("LayoutMap>" name).Device(tensorflow::DEVICE_CPU), Kernel)

// Registers both ids dtypes of a kernel that is a template over Tid.
#define LM_REGISTER_ID_KERNELS(name, Kernel)                    \
  REGISTER_KERNEL_BUILDER(Name("LayoutMap>" name)               \
                              .Device(tensorflow::DEVICE_CPU)   \
                              .TypeConstraint<int32_t>("Tids"), \
                          Kernel<int32_t>);                     \
  REGISTER_KERNEL_BUILDER(Name("LayoutMap>" name)               \
                              .Device(tensorflow::DEVICE_CPU)   \
                              .TypeConstraint<int64_t>("Tids"), \
                          Kernel<int64_t>)

#endif  // TF_LAYOUTMAP_KERNELS_KERNEL_UTIL_H_
