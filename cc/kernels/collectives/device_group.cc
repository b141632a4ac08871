#include "cc/kernels/collectives/device_group.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "absl/status/status.h"
#include "cc/core/collectives/arrivals.h"
#include "tensorflow/core/common_runtime/buf_rendezvous.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/collective.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace layoutmap {
namespace {

using tensorflow::CancellationManager;
using tensorflow::CollectiveExecutor;
using tensorflow::OpKernelContext;

// A key that no collective of TensorFlow uses.
constexpr char kWatchKey[] = "tf_layoutmap:meetings";

struct AllMeetings {
  std::mutex mutex;
  std::unordered_map<const CollectiveExecutor*, std::shared_ptr<Meetings>>
      by_executor;
};

// The object is never deleted, because TensorFlow can delete executors while
// the process exits.
AllMeetings& GetAllMeetings() {
  static auto* all = new AllMeetings;
  return *all;
}

}  // namespace

std::shared_ptr<Meetings> Meetings::Of(OpKernelContext* ctx) {
  CollectiveExecutor* executor = ctx->collective_executor();
  auto meetings = std::make_shared<Meetings>();
  {
    AllMeetings& all = GetAllMeetings();
    std::lock_guard<std::mutex> lock(all.mutex);
    std::shared_ptr<Meetings>& entry = all.by_executor[executor];
    // A closed entry can belong to a deleted executor with the same address. If
    // this executor was aborted, the new meetings are closed below.
    if (entry != nullptr && !entry->is_closed()) return entry;
    entry = meetings;
  }
  // TensorFlow aborts an executor by an error in all pending requests for
  // buffers, and also when it deletes the executor. No device provides the
  // buffer of this request.
  const auto on_abort = [executor, meetings](
                            const absl::Status& status,
                            tensorflow::BufRendezvous::Hook* /*hook*/) {
    Arrivals arrivals = meetings->Close(status);
    {
      AllMeetings& all = GetAllMeetings();
      std::lock_guard<std::mutex> lock(all.mutex);
      const auto it = all.by_executor.find(executor);
      if (it != all.by_executor.end() && it->second == meetings) {
        all.by_executor.erase(it);
      }
    }
    FinishAll(arrivals, status);
  };
  const tensorflow::DeviceAttributes& device = ctx->device()->attributes();
  executor->remote_access()->buf_rendezvous()->ConsumeBuf(
      kWatchKey, device.name(), device.incarnation(), on_abort,
      /*cancellation_manager=*/nullptr);
  return meetings;
}

absl::Status Meetings::status() {
  std::lock_guard<std::mutex> lock(mutex_);
  return status_;
}

Arrivals Meetings::Close(const absl::Status& status) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (status_.ok()) status_ = status;
  }
  is_closed_ = true;
  return table_.Close();
}

void FindGroup(
    OpKernelContext* ctx, int32_t key, int32_t size,
    std::function<void(std::shared_ptr<const DeviceGroup> group)> done) {
  CollectiveExecutor* executor = ctx->collective_executor();
  auto params = std::make_shared<tensorflow::CollGroupParams>();
  params->group_key = key;
  params->group_size = size;
  params->device_type = tensorflow::DeviceType(tensorflow::DEVICE_CPU);
  const auto on_members = [ctx, executor, params,
                           done](const absl::Status& status) {
    if (!status.ok()) {
      done(nullptr);
      return;
    }
    auto group = std::make_shared<DeviceGroup>();
    group->executor = executor;
    group->key = params->group_key;
    group->size = params->group_size;
    group->rank = -1;
    group->is_local = params->members.size() == params->group_size;
    const std::string& name = ctx->device()->name();
    for (int i = 0; i < params->members.size(); ++i) {
      const tensorflow::CollGroupMember& member = params->members[i];
      if (!member.is_local) group->is_local = false;
      if (member.device.name() == name) group->rank = i;
    }
    if (group->rank < 0) group->is_local = false;
    if (group->is_local) group->meetings = Meetings::Of(ctx);
    done(std::move(group));
  };
  // With several processes, the call could block.
  executor->RunClosure([ctx, executor, params, on_members] {
    executor->CompleteGroupAsync(ctx->device()->attributes(), params.get(),
                                 ctx->cancellation_manager(), on_members);
  });
}

bool WaitingDevice::WithdrawOnCancellation(
    const std::shared_ptr<WaitingDevice>& device) {
  CancellationManager* manager = device->ctx_->cancellation_manager();
  if (manager == nullptr) return true;
  device->token_ = manager->get_cancellation_token();
  device->has_token_ = true;
  return manager->RegisterCallback(device->token_, [device] {
    FinishAll(
        device->meetings_->table().Withdraw(device),
        absl::CancelledError(
            "A collective operation was cancelled, because a device of its "
            "group was cancelled."));
  });
}

void WaitingDevice::Finish(const absl::Status& status) {
  if (has_token_) {
    // If the cancellation has already started, its callback does not use `ctx`,
    // because the device does not wait any more.
    ctx_->cancellation_manager()->TryDeregisterCallback(token_);
  }
  if (!status.ok()) ctx_->SetStatus(status);
  const auto done = std::move(done_);
  done();
}

void FinishAll(const Arrivals& arrivals, const absl::Status& status) {
  for (const auto& arrival : arrivals) {
    static_cast<WaitingDevice*>(arrival.get())->Finish(status);
  }
}

}  // namespace layoutmap
