// Groups of devices of this process that run collectives together.

#ifndef TF_LAYOUTMAP_KERNELS_COLLECTIVES_DEVICE_GROUP_H_
#define TF_LAYOUTMAP_KERNELS_COLLECTIVES_DEVICE_GROUP_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "absl/status/status.h"
#include "cc/core/collectives/arrivals.h"
#include "tensorflow/core/framework/collective.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace layoutmap {

// The arrivals at all collectives of one executor of TensorFlow. The table is
// closed when TensorFlow aborts the collectives of this executor.
class Meetings {
 public:
  // Returns the meetings of the executor of `ctx`, which are created on first
  // use.
  static std::shared_ptr<Meetings> Of(tensorflow::OpKernelContext* ctx);

  ArrivalTable& table() { return table_; }
  bool is_closed() const { return is_closed_; }
  // The reason for which the table was closed.
  absl::Status status();

  // Closes the table, and returns the devices that wait.
  Arrivals Close(const absl::Status& status);

 private:
  ArrivalTable table_;
  std::atomic<bool> is_closed_{false};
  std::mutex mutex_;
  absl::Status status_;
};

// A group of devices, as one of its devices sees it.
struct DeviceGroup {
  // The executor, key and size of the group. The executor is only compared.
  const tensorflow::CollectiveExecutor* executor = nullptr;
  int32_t key = 0;
  int32_t size = 0;
  // The position of the device in the group.
  int rank = 0;
  // Whether all devices of the group belong to this process.
  bool is_local = false;
  std::shared_ptr<Meetings> meetings;
};

// Finds the members of the group with the key `key`, which has `size` devices.
// Calls `done` when all devices of the group have called this function,
// possibly in another thread. `group` is null in case of an error.
void FindGroup(
    tensorflow::OpKernelContext* ctx, int32_t key, int32_t size,
    std::function<void(std::shared_ptr<const DeviceGroup> group)> done);

// Completes the operations of devices, successfully or with an error.
void FinishAll(const Arrivals& arrivals, const absl::Status& status);

// A device that waits for the other devices of its group.
class WaitingDevice : public Arrival {
 public:
  WaitingDevice(tensorflow::OpKernelContext* ctx,
                tensorflow::AsyncOpKernel::DoneCallback done,
                std::shared_ptr<Meetings> meetings)
      : ctx_(ctx), done_(std::move(done)), meetings_(std::move(meetings)) {}

  tensorflow::OpKernelContext* ctx() const { return ctx_; }

  // Arranges that the cancellation of the step withdraws the device. Returns
  // false if the step is already cancelled.
  static bool WithdrawOnCancellation(
      const std::shared_ptr<WaitingDevice>& device);

  // Completes the operation. `ctx()` must not be used after this call.
  void Finish(const absl::Status& status);

 private:
  tensorflow::OpKernelContext* const ctx_;
  tensorflow::AsyncOpKernel::DoneCallback done_;
  const std::shared_ptr<Meetings> meetings_;
  tensorflow::CancellationToken token_ = 0;
  bool has_token_ = false;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_COLLECTIVES_DEVICE_GROUP_H_
