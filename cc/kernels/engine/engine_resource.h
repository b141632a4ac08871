// The resource that contains a host engine, and helpers for the kernels that
// use this resource.

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
#include "cc/core/engine/row_steps.h"
#include "cc/core/engine/token_steps.h"
#include "cc/core/rows/changed_rows.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"
#include "cc/kernels/engine/settled_memory.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"

namespace layoutmap {

// Memory for the activations of steps. All activations of a step are in one
// buffer. When the activations are no longer referenced, a later step reuses
// the buffer. New memory would be expensive, because the operating system
// clears it page by page, which takes about as long as the lookup that fills
// the memory.
class ActivationBuffers {
 public:
  // Creates an object that keeps at most `max_kept` buffers.
  explicit ActivationBuffers(size_t max_kept) : max_kept_(max_kept) {}

  // Returns a vector of at least `size` floats with undefined values.
  absl::Status Take(tensorflow::OpKernelContext* ctx, int64_t size,
                    tensorflow::Tensor* buffer);

  // Alignment of slices, in floats. TensorFlow's ops require the same alignment
  // that TensorFlow's allocator provides.
  static constexpr int64_t kAlignment = 64 / sizeof(float);

 private:
  const size_t max_kept_;
  std::mutex mutex_;
  std::vector<tensorflow::Tensor> kept_;
};

class EngineResource : public tensorflow::ResourceBase {
 public:
  // There are two buffers per replica, because the activations of one step are
  // still in use while the next step computes its activations.
  //
  // `vocabulary_buckets` is empty, or has one value for each table. If a table
  // is a shard of a table with an open vocabulary, the value is the number of
  // buckets of the full vocabulary. For other tables, the value is 0.
  explicit EngineResource(std::unique_ptr<HostEngine> engine,
                          std::vector<int64_t> vocabulary_buckets = {})
      : engine_(std::move(engine)),
        vocabulary_buckets_(std::move(vocabulary_buckets)),
        tokens_(engine_.get()),
        row_steps_(engine_.get()),
        changed_(NumRows(engine_->config())),
        buffers_(2 * engine_->config().num_replicas),
        next_(engine_->config().num_replicas) {}

  HostEngine& engine() { return *engine_; }
  TokenSteps& tokens() { return tokens_; }
  RowSteps& row_steps() { return row_steps_; }
  ActivationBuffers& buffers() { return buffers_; }
  ChangedRows& changed() { return changed_; }
  // Returns the number of buckets of the full vocabulary of a table, or 0 if
  // the engine has the full table.
  int64_t vocabulary_buckets(int32_t table) const {
    return vocabulary_buckets_.empty() ? 0 : vocabulary_buckets_[table];
  }
  // The memory ranges of the table shards, followed by the memory ranges of the
  // slot variables.
  SettledMemory& memory() { return memory_; }

  // The activations of the next step of a replica, which were looked up before
  // the step was dequeued.
  struct Next {
    // The batch and the number of updates for which the activations are valid.
    std::shared_ptr<const Batch> batch;
    int64_t num_updates = 0;
    std::vector<tensorflow::Tensor> activations;
  };
  void KeepNext(int32_t replica, Next next) {
    std::lock_guard<std::mutex> lock(mutex_);
    next_[replica] = std::move(next);
  }
  // Removes and returns the activations of a batch. Returns an empty vector if
  // there are none, or if a table has been updated since the lookup.
  std::vector<tensorflow::Tensor> TakeNext(
      int32_t replica, const std::shared_ptr<const Batch>& batch) {
    const int64_t num_updates = engine_->num_updates();
    std::lock_guard<std::mutex> lock(mutex_);
    Next next = std::exchange(next_[replica], Next());
    if (next.batch != batch || next.num_updates != num_updates) return {};
    return std::move(next.activations);
  }

  // Function that undoes the last change of the vocabularies. An op with the
  // same variables calls the function, which returns an error if the
  // vocabularies have changed again after this change.
  using TakeBack = std::function<absl::Status(tensorflow::OpKernelContext*)>;
  void KeepTakeBack(TakeBack take_back) {
    std::lock_guard<std::mutex> lock(mutex_);
    take_back_ = std::move(take_back);
  }
  // Removes the function and returns it, because it can be called only once.
  // Returns an empty function if no function is stored.
  TakeBack RemoveTakeBack() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(take_back_, nullptr);
  }

  // Makes every later call fail with the message `why`. If `why` is empty,
  // calls are allowed again.
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
  std::vector<int64_t> vocabulary_buckets_;
  TokenSteps tokens_;
  RowSteps row_steps_;
  ChangedRows changed_;
  ActivationBuffers buffers_;
  SettledMemory memory_;
  mutable std::mutex mutex_;  // Guards all members below.
  std::string retired_;
  TakeBack take_back_;
  std::vector<Next> next_;  // One element per replica.
};

using EnginePtr = tensorflow::core::RefCountPtr<EngineResource>;

// Gets the engine from the input `engine`. Returns an error if the engine is
// retired.
absl::Status GetEngine(tensorflow::OpKernelContext* ctx, EnginePtr* engine);

// Base class of ops with the inputs `engine` and `replica`.
class EngineOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  virtual absl::Status RunOn(tensorflow::OpKernelContext* ctx,
                             EngineResource& engine, int32_t replica) = 0;

  // Returns an error if a list does not have `expected` elements. In the error
  // message, `things` names the objects for which the list has one element
  // each, for example "features".
  static absl::Status CheckListSize(const char* things, const char* received_as,
                                    size_t expected, int received);
  // Runs `work` and then calls `finish(succeeded)`, which reports the result to
  // the engine. Also calls `finish` if `work` throws an exception because an
  // allocation failed.
  template <typename Work, typename Finish>
  static absl::Status RunAndFinish(const Work& work, const Finish& finish) {
    const absl::Status status = CatchAllTf(work);
    finish(status.ok());
    return status;
  }

 private:
  void Run(tensorflow::OpKernelContext* ctx) final;
};

// Returns the TensorFlow dtype of a table that has 16-bit rows.
tensorflow::DataType HalfDtype(const TableSpec& table);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_ENGINE_ENGINE_RESOURCE_H_
