// The single emulated TPU system of the process.

#ifndef TF_LAYOUTMAP_EMULATION_KERNELS_TPU_SYSTEM_H_
#define TF_LAYOUTMAP_EMULATION_KERNELS_TPU_SYSTEM_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "cc/core/base/status.h"
#include "cc/emulation/emulated_engine.h"
#include "cc/emulation/pending_calls.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace layoutmap {

using EmulatedEnginePtr = std::shared_ptr<EmulatedEngine>;

class TpuSystem {
 public:
  static TpuSystem& Get();

  absl::Status SetUp(int32_t num_cores, int32_t num_hosts, float deadline);
  // Creates the embedding of `config`. Its tables must be loaded afterwards.
  absl::Status Configure(const std::string& config);
  // Deletes the embedding and cancels the calls that wait for it.
  void Shutdown();

  // Returns the engine, or null if there is no embedding.
  EmulatedEnginePtr engine() const;
  // Gets the engine of an op. `config` is the configuration of the op and may
  // be empty.
  absl::Status EngineFor(const std::string& config,
                         EmulatedEnginePtr* engine) const;

  int32_t num_cores() const;
  int32_t num_hosts() const;
  PendingCalls::Clock::duration patience() const;

 private:
  mutable std::mutex mutex_;  // guards all members below
  int32_t num_cores_ = 0;     // 0 before the setup
  int32_t num_hosts_ = 0;
  PendingCalls::Clock::duration patience_{};
  EmulatedEnginePtr engine_;
};

// Returns the index of the logical device that runs the op, which is its core.
int32_t CoreOf(tensorflow::OpKernelContext* ctx);

// Calls `attempt` until it returns something other than `kNotYet`, and finishes
// the op with the result. If the deadline of the system expires, the op fails
// with an error that reports the queues. `attempt` may return a TensorFlow
// status in `*status`.
void RunWhenReady(
    tensorflow::OpKernelContext* ctx,
    tensorflow::AsyncOpKernel::DoneCallback done, EmulatedEnginePtr engine,
    const std::string& name,
    std::function<Status(absl::Status* status)> attempt,
    std::function<void()> at_end = [] {});

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_KERNELS_TPU_SYSTEM_H_
