// The emulated TPU system of this process.

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

  absl::Status SetUp(int32_t num_cores, int32_t num_hosts, float deadline,
                     int32_t sparse_cores_per_chip);
  // Creates the engine for the TPU embedding in `config`. The caller must load
  // the tables afterwards.
  absl::Status Configure(const std::string& config);
  // Deletes the engine and cancels the calls that wait for it.
  void Shutdown();

  // Returns the engine, or null if no TPU embedding is configured.
  EmulatedEnginePtr engine() const;
  // Gets the engine for an op. `config` is the configuration in the op's
  // attributes and may be empty.
  absl::Status EngineFor(const std::string& config,
                         EmulatedEnginePtr* engine) const;

  int32_t num_cores() const;
  int32_t num_hosts() const;
  // Returns 0 if the TPU has no SparseCores.
  int32_t sparse_cores_per_chip() const;
  PendingCalls::Clock::duration patience() const;

 private:
  // Guards all members below.
  mutable std::mutex mutex_;
  // Both numbers are 0 before the setup of the system.
  int32_t num_cores_ = 0;
  int32_t num_hosts_ = 0;
  int32_t sparse_cores_per_chip_ = 0;
  PendingCalls::Clock::duration patience_{};
  EmulatedEnginePtr engine_;
};

// Returns the core of an op, which is the index of the logical device that runs
// the op.
int32_t CoreOf(tensorflow::OpKernelContext* ctx);

// Repeats `attempt` until its result is not `kNotYet`, and finishes the op with
// this result. If the result is still `kNotYet` at the deadline, the op fails
// with an error, to which `report` is appended. `attempt` may store a
// TensorFlow status in `*status`. `at_end` is called before `done`. `calls` is
// kept alive until the end of the call.
void RunWhenReady(tensorflow::OpKernelContext* ctx,
                  tensorflow::AsyncOpKernel::DoneCallback done,
                  std::shared_ptr<PendingCalls> calls, const std::string& name,
                  std::function<Status(absl::Status* status)> attempt,
                  std::function<void()> at_end,
                  std::function<std::string()> report);

// Runs a call that waits for other calls of `engine`. The error at the deadline
// describes the queues of the engine.
void RunWhenReady(
    tensorflow::OpKernelContext* ctx,
    tensorflow::AsyncOpKernel::DoneCallback done,
    const EmulatedEnginePtr& engine, const std::string& name,
    std::function<Status(absl::Status* status)> attempt,
    std::function<void()> at_end = [] {});

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_KERNELS_TPU_SYSTEM_H_
