#include "cc/kernels/engine/engine_resource.h"

#include <cstddef>
#include <cstdint>
#include <mutex>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/row_type.h"
#include "cc/core/memory/huge_pages.h"
#include "cc/core/steps/engine_config.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"

namespace layoutmap {

using tensorflow::OpKernelContext;
using tensorflow::ResourceHandle;

absl::Status ActivationBuffers::Take(OpKernelContext* ctx, int64_t size,
                                     tensorflow::Tensor* buffer) {
  std::lock_guard<std::mutex> lock(mutex_);
  tensorflow::Tensor* place = nullptr;
  for (tensorflow::Tensor& kept : kept_) {
    // The reference count also includes slices of the tensor that are in use.
    if (!kept.RefCountIsOne()) continue;
    if (kept.NumElements() >= size && kept.NumElements() / 2 <= size) {
      *buffer = kept;
      return absl::OkStatus();
    }
    place = &kept;
  }
  if (place == nullptr && kept_.size() < max_kept_) {
    place = &kept_.emplace_back();
  }
  // The new buffer replaces a free buffer, which is too small or more than
  // twice as large as required.
  if (place != nullptr) *place = tensorflow::Tensor();
  TF_RETURN_IF_ERROR(ctx->allocate_temp(tensorflow::DT_FLOAT, {size}, buffer));
  AdviseHugePages(buffer->data(), buffer->TotalBytes());
  if (place != nullptr) *place = *buffer;
  return absl::OkStatus();
}

absl::Status GetEngine(OpKernelContext* ctx, EnginePtr* engine) {
  const tensorflow::Tensor* handle;
  TF_RETURN_IF_ERROR(GetInput(ctx, "engine", 0, &handle));
  TF_RETURN_IF_ERROR(tensorflow::LookupResource(
      ctx, handle->scalar<ResourceHandle>()(), engine));
  return (*engine)->CheckNotRetired();
}

void EngineOp::Run(OpKernelContext* ctx) {
  EnginePtr engine;
  int32_t replica;
  OP_REQUIRES_OK(ctx, GetEngine(ctx, &engine));
  OP_REQUIRES_OK(ctx, GetScalar(ctx, "replica", &replica));
  OP_REQUIRES_OK(ctx, RunOn(ctx, *engine, replica));
}

absl::Status EngineOp::CheckListSize(const char* things,
                                     const char* received_as, size_t expected,
                                     int received) {
  if (received == static_cast<int>(expected)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("This engine has ", expected, " ", things,
                   ". Received: ", received, " ", received_as));
}

tensorflow::DataType HalfDtype(const TableSpec& table) {
  return table.row_type == RowType::kBfloat16 ? tensorflow::DT_BFLOAT16
                                              : tensorflow::DT_HALF;
}

}  // namespace layoutmap
