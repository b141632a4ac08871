// The one emulated TPU system of the process, as a TPU is one.

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
  // Gives the system the embedding of `config`, whose tables are to be loaded.
  absl::Status Configure(const std::string& config);
  // Forgets the embedding; calls that wait for it are cancelled.
  void Shutdown();

  // Null if there is no embedding.
  EmulatedEnginePtr engine() const;
  // The embedding an op belongs to; `config` is the op's, perhaps empty.
  absl::Status EngineFor(const std::string& config,
                         EmulatedEnginePtr* engine) const;

  int32_t num_cores() const;
  int32_t num_hosts() const;
  PendingCalls::Clock::duration patience() const;

 private:
  mutable std::mutex mutex_;  // guards all below
  int32_t num_cores_ = 0;     // 0: not set up
  int32_t num_hosts_ = 0;
  PendingCalls::Clock::duration patience_{};
  EmulatedEnginePtr engine_;
};

// The logical device an op runs on, which is its core.
int32_t CoreOf(tensorflow::OpKernelContext* ctx);

// Finishes the op with what `attempt` says once that is no longer "not yet",
// or with an error that tells the queues when the system's patience is at an
// end. `attempt` may leave a status of TensorFlow's in `*status`.
void RunWhenReady(
    tensorflow::OpKernelContext* ctx,
    tensorflow::AsyncOpKernel::DoneCallback done, EmulatedEnginePtr engine,
    const std::string& name,
    std::function<Status(absl::Status* status)> attempt,
    std::function<void()> at_end = [] {});

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_KERNELS_TPU_SYSTEM_H_
