#include "cc/kernels/kernel_util.h"

#include <exception>
#include <string>

#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/util/work_sharder.h"

namespace layoutmap {

absl::Status ToTf(const Status& status) {
  switch (status.code()) {
    case Code::kOk:
      break;
    case Code::kInvalidArgument:
      return absl::InvalidArgumentError(status.message());
    case Code::kFailedPrecondition:
    case Code::kNotYet:
      return absl::FailedPreconditionError(status.message());
  }
  return absl::OkStatus();
}

void Kernel::Compute(tensorflow::OpKernelContext* ctx) {
  try {
    Run(ctx);
  } catch (const std::exception& error) {
    // std::bad_alloc and std::length_error; nothing else is thrown here.
    ctx->SetStatus(absl::ResourceExhaustedError(
        absl::StrCat(name(), ": out of memory for its temporary values (",
                     error.what(), ")")));
  }
}

ParallelFor TfParallelFor(tensorflow::OpKernelContext* ctx) {
  const auto* workers = ctx->device()->tensorflow_cpu_worker_threads();
  return [workers](int64_t total, int64_t cost,
                   const std::function<void(int64_t, int64_t)>& work) {
    tensorflow::Shard(workers->num_threads, workers->workers, total, cost,
                      work);
  };
}

int NumWorkers(tensorflow::OpKernelContext* ctx) {
  return ctx->device()->tensorflow_cpu_worker_threads()->num_threads;
}

absl::Status CheckRank(const char* name, const tensorflow::Tensor& tensor,
                       int rank) {
  if (tensor.dims() == rank) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("`", name, "` must have rank ",
                                                 rank, ". Received: shape ",
                                                 tensor.shape().DebugString()));
}

absl::Status GetPlacement(tensorflow::OpKernelConstruction* ctx,
                          Placement* placement) {
  std::string name;
  absl::Status status = ctx->GetAttr("placement", &name);
  return status.ok() ? ToTf(ParsePlacement(name, placement)) : status;
}

}  // namespace layoutmap
