// The engine behind a resource handle, and what its kernels share.

#ifndef TF_LAYOUTMAP_KERNELS_ENGINE_ENGINE_RESOURCE_H_
#define TF_LAYOUTMAP_KERNELS_ENGINE_ENGINE_RESOURCE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/engine/token_steps.h"
#include "cc/core/rows/changed_rows.h"
#include "cc/core/steps/engine_config.h"
#include "cc/kernels/engine/settled_memory.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"

namespace layoutmap {

// Memory for the activations of a step, all of them in one buffer, which later
// steps take again as soon as nobody holds any of its activations. Memory fresh
// from the system is cleared by it page by page, which takes about as long as
// looking up rows to fill it.
class ActivationBuffers {
 public:
  // Keeps no more than `max_kept`.
  explicit ActivationBuffers(size_t max_kept) : max_kept_(max_kept) {}

  // A vector of `size` floats or more, which are anything.
  absl::Status Take(tensorflow::OpKernelContext* ctx, int64_t size,
                    tensorflow::Tensor* buffer);

  // Where slices start, in floats: TensorFlow's operations read and write
  // memory as aligned as that of its allocator.
  static constexpr int64_t kAlignment = 64 / sizeof(float);

 private:
  const size_t max_kept_;
  std::mutex mutex_;
  std::vector<tensorflow::Tensor> kept_;
};

class EngineResource : public tensorflow::ResourceBase {
 public:
  // Of each replica, the activations of one step are in use while those of the
  // next are made.
  explicit EngineResource(std::unique_ptr<HostEngine> engine)
      : engine_(std::move(engine)),
        tokens_(engine_.get()),
        changed_(NumRows(engine_->config())),
        buffers_(2 * engine_->config().num_replicas) {}

  HostEngine& engine() { return *engine_; }
  TokenSteps& tokens() { return tokens_; }
  ActivationBuffers& buffers() { return buffers_; }
  ChangedRows& changed() { return changed_; }
  // Of the shards, and then of the slot variables.
  SettledMemory& memory() { return memory_; }

  // Refuses every call from now on, as `why` says; none if it is empty.
  // How the last change of vocabularies is taken back, by an op with the same
  // variables, as long as nothing was changed since.
  using TakeBack = std::function<absl::Status(tensorflow::OpKernelContext*)>;
  void KeepTakeBack(TakeBack take_back) {
    std::lock_guard<std::mutex> lock(mutex_);
    take_back_ = std::move(take_back);
  }
  // Empty if there is none. It works once.
  TakeBack RemoveTakeBack() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(take_back_, nullptr);
  }

  void Retire(const std::string& why) {
    std::lock_guard<std::mutex> lock(mutex_);
    retired_ = why;
  }
  absl::Status CheckNotRetired() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return retired_.empty() ? absl::OkStatus()
                            : absl::FailedPreconditionError(retired_);
  }

  std::string DebugString() const override {
    return absl::StrCat("HostEngine with ", engine_->config().tables.size(),
                        " tables");
  }

 private:
  static std::vector<int64_t> NumRows(const EngineConfig& config) {
    std::vector<int64_t> num_rows;
    for (const TableSpec& table : config.tables) {
      num_rows.push_back(table.partition.num_rows());
    }
    return num_rows;
  }

  std::unique_ptr<HostEngine> engine_;
  TokenSteps tokens_;
  ChangedRows changed_;
  ActivationBuffers buffers_;
  SettledMemory memory_;
  mutable std::mutex mutex_;  // guards all below
  std::string retired_;
  TakeBack take_back_;
};

using EnginePtr = tensorflow::core::RefCountPtr<EngineResource>;

// The engine of the input `engine`, refused if it is retired.
absl::Status GetEngine(tensorflow::OpKernelContext* ctx, EnginePtr* engine);

// An op that works on the inputs `engine` and `replica`.
class EngineOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  virtual absl::Status RunOn(tensorflow::OpKernelContext* ctx,
                             EngineResource& engine, int32_t replica) = 0;

  // Refuses a list that must have one for each of the engine's `things`.
  static absl::Status CheckListSize(const char* things, const char* received_as,
                                    size_t expected, int received);
  // Runs what the engine has begun, and tells it by `finish(succeeded)` how it
  // ended, also where it throws for lack of memory.
  template <typename Work, typename Finish>
  static absl::Status RunAndFinish(const Work& work, const Finish& finish) {
    const absl::Status status = CatchAllTf(work);
    finish(status.ok());
    return status;
  }

 private:
  void Run(tensorflow::OpKernelContext* ctx) final;
};

// How TensorFlow calls a table's 16-bit rows.
tensorflow::DataType HalfDtype(const TableSpec& table);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_ENGINE_ENGINE_RESOURCE_H_
