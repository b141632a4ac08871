// Functions that connect TensorFlow and the core. They convert statuses,
// provide threads, and access inputs and outputs.

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

// Converts a status of the core to a TensorFlow status.
absl::Status ToTf(const Status& status);

// Returns the status that `run` returns. If `run` throws an exception, converts
// the exception to a status.
template <typename Run>
absl::Status CatchAllTf(const Run& run) {
  try {
    return run();
  } catch (...) {
    return ToTf(StatusOfException());
  }
}

// Base class of all kernels in this package. Inputs can have any size, so an
// allocation can fail. In this case, the op returns an error, and the process
// continues.
class Kernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* ctx) final;

 protected:
  virtual void Run(tensorflow::OpKernelContext* ctx) = 0;
};

// These functions return a parallel loop that uses the intra-op threads of the
// device, and the number of these threads.
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

// Kernels access inputs and outputs by the names in the op definition (cc/ops),
// and never by index. Therefore, kernels do not depend on the order of the
// inputs and outputs.

// Returns an error if the tensor does not have the rank `rank`. `name` is the
// name of the input in the error message.
absl::Status CheckRank(const char* name, const tensorflow::Tensor& tensor,
                       int rank);

// Gets the input `name`. Returns an error if the input does not have the rank
// `rank`.
absl::Status GetInput(tensorflow::OpKernelContext* ctx, const char* name,
                      int rank, const tensorflow::Tensor** tensor);

// Gets the value of the scalar input `name`.
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

// Sets the output `name` to a vector. The element type of `values` may differ
// from the type of the output.
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

// These functions read the attribute `placement` and the attribute `optimizer`.
absl::Status GetPlacement(tensorflow::OpKernelConstruction* ctx,
                          Placement* placement);
absl::Status GetOptimizer(tensorflow::OpKernelConstruction* ctx,
                          Optimizer* optimizer);

// Creates a partition from the input `offsets` and the placement.
absl::Status GetPartition(tensorflow::OpKernelContext* ctx, Placement placement,
                          RowPartition* partition);

}  // namespace layoutmap

// Registers a CPU kernel. `name` is the name of the op without the prefix
// "LayoutMap>".
#define LM_REGISTER_KERNEL(name, Kernel) \
  REGISTER_KERNEL_BUILDER(               \
      Name("LayoutMap>" name).Device(tensorflow::DEVICE_CPU), Kernel)

// Registers a CPU kernel template for both dtypes of ids, int32 and int64.
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
