#include "cc/kernels/kernel_util.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/condition_wait.h"
#include "cc/core/base/catch_all.h"
#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/simd/row_kernels.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/threadpool.h"

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
    case Code::kOutOfMemory:
      return absl::ResourceExhaustedError(status.message());
    case Code::kInternal:
      return absl::InternalError(status.message());
  }
  return absl::OkStatus();
}

void Kernel::Compute(tensorflow::OpKernelContext* ctx) {
  const Status status = CatchAll([&] {
    Run(ctx);
    return Status();
  });
  if (status.ok()) return;
  ctx->SetStatus(ToTf(
      Status(status.code(), absl::StrCat(name(), ": ", status.message()))));
}

namespace {

// A loop that is split into blocks. Each thread takes the next block as soon as
// it is free, and the caller also runs blocks. When no block is left, the
// caller waits only for the blocks that are still running. If each thread had a
// fixed share of the loop, the caller would also have to wait until all threads
// wake up.
class SharedLoop {
 public:
  SharedLoop(int64_t total, int64_t num_blocks,
             const std::function<void(int64_t, int64_t)>& work)
      : total_(total), num_blocks_(num_blocks), work_(work) {}

  // Runs blocks until no block is left. A thread may call this method after
  // `Wait` has returned, because no block is left at that time.
  void TakeBlocks() {
    while (true) {
      const int64_t block = next_.fetch_add(1, std::memory_order_relaxed);
      if (block >= num_blocks_) return;
      try {
        work_(total_ * block / num_blocks_, total_ * (block + 1) / num_blocks_);
      } catch (...) {
        if (!has_failed_.exchange(true)) error_ = std::current_exception();
      }
      if (num_done_.fetch_add(1, std::memory_order_acq_rel) + 1 ==
          num_blocks_) {
        // The lock prevents a notification between the caller's check of the
        // condition and the start of its wait.
        std::lock_guard<std::mutex> lock(mutex_);
        all_done_.notify_one();
      }
    }
  }

  // Waits until all blocks are done. If a block has thrown an exception,
  // rethrows the exception.
  void Wait() {
    // The other threads are running their last blocks, so the wait is short.
    // The loop yields first, because going to sleep takes about as long as this
    // wait.
    for (int i = 0; i < 100 && !IsDone(); ++i) std::this_thread::yield();
    std::unique_lock<std::mutex> lock(mutex_);
    while (!IsDone()) WaitOn(all_done_, lock);
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  bool IsDone() const {
    return num_done_.load(std::memory_order_acquire) == num_blocks_;
  }

  const int64_t total_;
  const int64_t num_blocks_;
  const std::function<void(int64_t, int64_t)>& work_;
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> num_done_{0};
  std::atomic<bool> has_failed_{false};
  std::exception_ptr error_;
  std::mutex mutex_;
  std::condition_variable all_done_;
};

}  // namespace

ParallelFor TfParallelFor(tensorflow::OpKernelContext* ctx) {
  const auto* workers = ctx->device()->tensorflow_cpu_worker_threads();
  return [workers](int64_t total, int64_t cost,
                   const std::function<void(int64_t, int64_t)>& work) {
    constexpr double kNanosPerBlock = 15e3;
    constexpr int64_t kBlocksPerThread = 8;
    const int64_t num_threads = workers->num_threads;
    const double wanted =
        static_cast<double>(total) * static_cast<double>(cost) / kNanosPerBlock;
    const int64_t num_blocks =
        std::min({total, kBlocksPerThread * num_threads,
                  static_cast<int64_t>(std::min<double>(wanted, 1 << 20))});
    if (num_threads == 1 || num_blocks <= 1) {
      if (total > 0) work(0, total);
      return;
    }
    auto loop = std::make_shared<SharedLoop>(total, num_blocks, work);
    for (int64_t i = 1; i < std::min(num_threads, num_blocks); ++i) {
      workers->workers->Schedule([loop] { loop->TakeBlocks(); });
    }
    loop->TakeBlocks();
    loop->Wait();
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

absl::Status GetInput(tensorflow::OpKernelContext* ctx, const char* name,
                      int rank, const tensorflow::Tensor** tensor) {
  TF_RETURN_IF_ERROR(ctx->input(name, tensor));
  return CheckRank(name, **tensor, rank);
}

absl::Status GetPlacement(tensorflow::OpKernelConstruction* ctx,
                          Placement* placement) {
  std::string name;
  TF_RETURN_IF_ERROR(ctx->GetAttr("placement", &name));
  return ToTf(ParsePlacement(name, placement));
}

absl::Status GetOptimizer(tensorflow::OpKernelConstruction* ctx,
                          Optimizer* optimizer) {
  std::string name;
  TF_RETURN_IF_ERROR(ctx->GetAttr("optimizer", &name));
  return ToTf(ParseOptimizer(name, optimizer));
}

absl::Status GetPartition(tensorflow::OpKernelContext* ctx, Placement placement,
                          RowPartition* partition) {
  const tensorflow::Tensor* offsets;
  TF_RETURN_IF_ERROR(GetInput(ctx, "offsets", 1, &offsets));
  return ToTf(
      RowPartition::Make(placement, View<int64_t>(*offsets), partition));
}

}  // namespace layoutmap
