// Between TensorFlow and the core: statuses, threads, tables.

#ifndef TF_LAYOUTMAP_KERNELS_KERNEL_UTIL_H_
#define TF_LAYOUTMAP_KERNELS_KERNEL_UTIL_H_

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/tables/lookup.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace layoutmap {

absl::Status ToTf(const Status& status);

// What all our kernels are: sizes come from the outside, and one that no
// memory holds is an error of the call, not the end of the process.
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

// Fails unless the tensor has this rank; `name` is the op's input.
absl::Status CheckRank(const char* name, const tensorflow::Tensor& tensor,
                       int rank);

// Allocates output `index` and copies `values` into it.
template <typename T>
absl::Status SetOutput(tensorflow::OpKernelContext* ctx, int index,
                       const std::vector<T>& values) {
  tensorflow::Tensor* output = nullptr;
  const auto size = static_cast<int64_t>(values.size());
  absl::Status status =
      ctx->allocate_output(index, tensorflow::TensorShape({size}), &output);
  if (status.ok() && size > 0) {
    memcpy(output->flat<T>().data(), values.data(), size * sizeof(T));
  }
  return status;
}

// The attr `placement`.
absl::Status GetPlacement(tensorflow::OpKernelConstruction* ctx,
                          Placement* placement);

}  // namespace layoutmap

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
