#include "cc/emulation/kernels/tpu_system.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/catch_all.h"
#include "cc/core/base/status.h"
#include "cc/emulation/emulated_engine.h"
#include "cc/emulation/pending_calls.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace layoutmap {

using tensorflow::CancellationManager;
using tensorflow::CancellationToken;
using tensorflow::OpKernelContext;

TpuSystem& TpuSystem::Get() {
  // The object is never destroyed, because calls may still be waiting when the
  // process ends.
  static TpuSystem* system = new TpuSystem;
  return *system;
}

absl::Status TpuSystem::SetUp(int32_t num_cores, int32_t num_hosts,
                              float deadline, int32_t sparse_cores_per_chip) {
  if (num_cores < 1 || num_hosts < 1 || num_cores % num_hosts != 0 ||
      !(deadline > 0 && deadline <= 1e6f)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "`num_cores` must be a multiple of `num_hosts` and `deadline` in (0, "
        "1e6] seconds. Received: ",
        num_cores, ", ", num_hosts, ", ", deadline));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (engine_ != nullptr &&
      (num_cores != num_cores_ || num_hosts != num_hosts_)) {
    return absl::FailedPreconditionError(
        "The emulated TPU already has an embedding; call "
        "`tlm.emulation.enable` before building an embedding");
  }
  num_cores_ = num_cores;
  num_hosts_ = num_hosts;
  sparse_cores_per_chip_ = sparse_cores_per_chip;
  patience_ = std::chrono::duration_cast<PendingCalls::Clock::duration>(
      std::chrono::duration<float>(deadline));
  return absl::OkStatus();
}

absl::Status TpuSystem::Configure(const std::string& config) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (num_cores_ == 0) {
    return absl::FailedPreconditionError(
        "The emulated TPU is not set up; call `tlm.emulation.enable` first");
  }
  if (sparse_cores_per_chip_ > 0) {
    return absl::FailedPreconditionError(
        "The emulated TPU has SparseCores and no embedding engine; use "
        "`TPUEmbeddingV2`, or call `tlm.emulation.enable` without `tpu`");
  }
  if (engine_ != nullptr) {
    return absl::FailedPreconditionError(
        "The TPU is already initialized for an embedding; call "
        "`tlm.emulation.initialize_tpu_system()` before building another one");
  }
  const Status made = CatchAll([&] {
    return EmulatedEngine::Make(config, num_cores_, num_hosts_, &engine_);
  });
  if (made.code() != Code::kOutOfMemory) return ToTf(made);
  return absl::ResourceExhaustedError(
      absl::StrCat("The tables do not fit in memory: ", made.message()));
}

void TpuSystem::Shutdown() {
  EmulatedEnginePtr engine;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    engine.swap(engine_);
  }
  if (engine == nullptr) return;
  engine->pending_calls().Close(
      FailedPrecondition("the TPU system was shut down or initialized again"));
}

EmulatedEnginePtr TpuSystem::engine() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return engine_;
}

absl::Status TpuSystem::EngineFor(const std::string& config,
                                  EmulatedEnginePtr* engine) const {
  *engine = this->engine();
  if (*engine == nullptr) {
    return absl::FailedPreconditionError(
        "The emulated TPU has no embedding; build it first");
  }
  return ToTf((*engine)->CheckConfig(config));
}

int32_t TpuSystem::num_cores() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_cores_;
}

int32_t TpuSystem::num_hosts() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_hosts_;
}

int32_t TpuSystem::sparse_cores_per_chip() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return sparse_cores_per_chip_;
}

PendingCalls::Clock::duration TpuSystem::patience() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return patience_;
}

int32_t CoreOf(OpKernelContext* ctx) { return ctx->device()->parsed_name().id; }

namespace {

// Returns the status of the op `name`, whose call has ended with `status`.
absl::Status StatusOfEnd(PendingCalls::End end, const Status& status,
                         const std::string& name,
                         PendingCalls::Clock::duration patience,
                         const std::function<std::string()>& report) {
  switch (end) {
    case PendingCalls::End::kAttempted:
      return ToTf(status);
    case PendingCalls::End::kCancelled:
      return absl::CancelledError(
          absl::StrCat(name, " was cancelled: ", status.message()));
    case PendingCalls::End::kExpired:
      break;
  }
  return absl::DeadlineExceededError(absl::StrCat(
      name, " has waited for ", std::chrono::duration<double>(patience).count(),
      " s, where a TPU would wait forever: ", status.message(), report()));
}

}  // namespace

void RunWhenReady(OpKernelContext* ctx,
                  tensorflow::AsyncOpKernel::DoneCallback done,
                  std::shared_ptr<PendingCalls> calls, const std::string& name,
                  std::function<Status(absl::Status* status)> attempt,
                  std::function<void()> at_end,
                  std::function<std::string()> report) {
  CancellationManager* cancellation = ctx->cancellation_manager();
  const CancellationToken token = cancellation == nullptr
                                      ? CancellationManager::kInvalidToken
                                      : cancellation->get_cancellation_token();
  auto tf_status = std::make_shared<absl::Status>();
  PendingCalls::Call call;
  call.name = name;
  call.patience = TpuSystem::Get().patience();
  call.attempt = [attempt = std::move(attempt), tf_status] {
    return CatchAll([&] { return attempt(tf_status.get()); });
  };
  // The runner is copied, because the call may end the step before the
  // scheduling function returns. The end of the step destroys the runner of the
  // step.
  call.schedule = *ctx->runner();
  call.finish = [ctx, done = std::move(done), calls, name, tf_status,
                 cancellation, token, patience = call.patience,
                 at_end = std::move(at_end), report = std::move(report)](
                    PendingCalls::End end, const Status& status) {
    if (cancellation != nullptr) cancellation->TryDeregisterCallback(token);
    ctx->SetStatus(end == PendingCalls::End::kAttempted && !tf_status->ok()
                       ? *tf_status
                       : StatusOfEnd(end, status, name, patience, report));
    at_end();
    done();
  };
  auto ticket = calls->Admit(std::move(call));
  const auto cancel = [calls, ticket] {
    calls->Cancel(ticket, FailedPrecondition("the step was stopped"));
  };
  if (cancellation != nullptr &&
      !cancellation->RegisterCallback(token, cancel)) {
    cancel();
  }
  calls->Start(ticket);
}

void RunWhenReady(OpKernelContext* ctx,
                  tensorflow::AsyncOpKernel::DoneCallback done,
                  const EmulatedEnginePtr& engine, const std::string& name,
                  std::function<Status(absl::Status* status)> attempt,
                  std::function<void()> at_end) {
  RunWhenReady(ctx, std::move(done),
               std::shared_ptr<PendingCalls>(engine, &engine->pending_calls()),
               name, std::move(attempt), std::move(at_end), [engine] {
                 return absl::StrCat(". The emulated TPU:\n", engine->Report());
               });
}

}  // namespace layoutmap
