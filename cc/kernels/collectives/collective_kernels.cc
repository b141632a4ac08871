// All-reduces of DTensor between devices of this process.
//
// The kernel is registered for an op of TensorFlow with a higher priority than
// TensorFlow's kernel, and only for the ops that DTensor creates. TensorFlow's
// kernel remains responsible for groups with devices of other processes.

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cc/core/collectives/arrivals.h"
#include "cc/core/collectives/reduction.h"
#include "cc/kernels/collectives/device_group.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/common_runtime/base_collective_executor.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/denormal.h"

namespace layoutmap {
namespace {

using tensorflow::DataType;
using tensorflow::NodeDef;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// Disables the kernels of this file if the value is 0.
constexpr char kSwitch[] = "TF_LAYOUTMAP_LOCAL_COLLECTIVES";
constexpr char kHint[] = "communication_hint";
// DTensor sets this hint. It has the same meaning as "auto" for CPUs.
constexpr char kHintOfDTensor[] = "";

bool IsEnabled() {
  const char* value = std::getenv(kSwitch);
  return value == nullptr || absl::string_view(value) != "0";
}

// Above this number of bytes per chunk, TensorFlow divides chunks, and the
// order of the operands is different.
constexpr int64_t kMaxChunkBytes = 4 << 20;

bool ReadType(DataType dtype, ElementType* type) {
  switch (dtype) {
    case tensorflow::DT_FLOAT:
      *type = ElementType::kFloat;
      return true;
    case tensorflow::DT_DOUBLE:
      *type = ElementType::kDouble;
      return true;
    case tensorflow::DT_HALF:
      *type = ElementType::kHalf;
      return true;
    case tensorflow::DT_BFLOAT16:
      *type = ElementType::kBfloat16;
      return true;
    case tensorflow::DT_INT32:
      *type = ElementType::kInt32;
      return true;
    case tensorflow::DT_INT64:
      *type = ElementType::kInt64;
      return true;
    default:
      return false;
  }
}

bool ReadMergeOp(absl::string_view name, MergeOp* merge) {
  if (name == "Add") {
    *merge = MergeOp::kAdd;
  } else if (name == "Mul") {
    *merge = MergeOp::kMul;
  } else if (name == "Max") {
    *merge = MergeOp::kMax;
  } else if (name == "Min") {
    *merge = MergeOp::kMin;
  } else {
    return false;
  }
  return true;
}

// Replaces TensorFlow's kernel of CollectiveReduceV2.
class LocalReduceOp : public tensorflow::AsyncOpKernel {
 public:
  explicit LocalReduceOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    MakeOriginal(ctx);
    if (!ctx->status().ok()) return;
    DataType dtype;
    std::string merge, final;
    float timeout;
    int num_tokens;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("merge_op", &merge));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("final_op", &final));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("timeout_seconds", &timeout));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("Nordering_token", &num_tokens));
    // TensorFlow recognizes the ops of DTensor by their names, too.
    is_replaced_ = IsEnabled() && absl::StrContains(name(), "DTensor") &&
                   timeout <= 0 && num_tokens == 0 &&
                   ReadType(dtype, &reduction_.type) &&
                   ReadMergeOp(merge, &reduction_.merge) &&
                   (final == "Id" || final == "Div");
    // If more than two devices have zeros of both signs or subnormal values,
    // the sign of the result depends on the instructions that TensorFlow uses.
    const bool is_float =
        dtype == tensorflow::DT_FLOAT || dtype == tensorflow::DT_DOUBLE ||
        dtype == tensorflow::DT_HALF || dtype == tensorflow::DT_BFLOAT16;
    depends_on_instructions_ = is_float && (merge == "Max" || merge == "Min");
    reduction_.final = final == "Div" ? FinalOp::kDivide : FinalOp::kIdentity;
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    int32_t size, key;
    const int32_t max_size =
        depends_on_instructions_ ? 2 : std::numeric_limits<int32_t>::max();
    if (!is_replaced_ || ctx->collective_executor() == nullptr ||
        !ReadScalar(ctx->input(1), &size) || !ReadScalar(ctx->input(2), &key) ||
        size < 2 || size > max_size) {
      RunOriginal(ctx, std::move(done));
      return;
    }
    std::shared_ptr<const DeviceGroup> group;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      group = group_;
    }
    if (group != nullptr && group->executor == ctx->collective_executor() &&
        group->key == key && group->size == size &&
        !(group->is_local && group->meetings->is_closed())) {
      RunIn(std::move(group), ctx, std::move(done));
      return;
    }
    FindGroup(ctx, key, size,
              [this, ctx, done = std::move(done)](
                  std::shared_ptr<const DeviceGroup> known) mutable {
                if (known == nullptr) {
                  // TensorFlow's kernel raises the error.
                  RunOriginal(ctx, std::move(done));
                  return;
                }
                {
                  std::lock_guard<std::mutex> lock(mutex_);
                  group_ = known;
                }
                RunIn(std::move(known), ctx, std::move(done));
              });
  }

 private:
  static bool ReadScalar(const Tensor& tensor, int32_t* value) {
    if (tensor.dtype() != tensorflow::DT_INT32 || tensor.NumElements() != 1 ||
        tensor.dims() != 0) {
      return false;
    }
    *value = tensor.scalar<int32_t>()();
    return true;
  }

  // Creates TensorFlow's kernel for the same node.
  void MakeOriginal(OpKernelConstruction* ctx) {
    NodeDef node = ctx->def();
    tensorflow::SetAttrValue("auto", &(*node.mutable_attr())[kHint]);
    absl::Status status;
    original_ = tensorflow::CreateOpKernel(
        ctx->device_type(), ctx->device(),
        ctx->device()->GetAllocator(tensorflow::AllocatorAttributes()), node,
        ctx->graph_def_version(), &status);
    OP_REQUIRES_OK(ctx, status);
    OP_REQUIRES(
        ctx, original_->AsAsync() != nullptr,
        absl::InternalError("TensorFlow's kernel is not asynchronous."));
  }

  void RunOriginal(OpKernelContext* ctx, DoneCallback done) {
    original_->AsAsync()->ComputeAsync(ctx, std::move(done));
  }

  int64_t ChunkElements(int64_t num_elements, int32_t group_size) const {
    return tensorflow::CollectiveAdapter::AlignedChunkElts(
        BytesPerElement(reduction_.type), num_elements, group_size);
  }

  void RunIn(std::shared_ptr<const DeviceGroup> group, OpKernelContext* ctx,
             DoneCallback done) {
    const Tensor& input = ctx->input(0);
    int32_t instance;
    if (!group->is_local || input.TotalBytes() > kMaxChunkBytes * group->size ||
        !ReadScalar(ctx->input(3), &instance)) {
      RunOriginal(ctx, std::move(done));
      return;
    }
    auto device =
        std::make_shared<WaitingDevice>(ctx, std::move(done), group->meetings);
    if (!WaitingDevice::WithdrawOnCancellation(device)) {
      device->Finish(absl::CancelledError(
          absl::StrCat(name(), ": The step is cancelled.")));
      return;
    }
    const tensorflow::FrameAndIter frame = ctx->frame_iter();
    // The step id is not a part of the key, because the body of a loop that is
    // called as a function has different step ids on different devices. As with
    // TensorFlow's kernel, only one step of a function may run at a time.
    // If the device waits, another thread may delete `ctx` during this call.
    ArrivalTable::Result result = group->meetings->table().Arrive(
        {group->key, instance, frame.frame_id, frame.iter_id}, group->rank,
        group->size, std::move(device));
    switch (result.outcome) {
      case ArrivalTable::Outcome::kWaiting:
        return;
      case ArrivalTable::Outcome::kComplete:
        FinishAll(result.arrivals, ReduceAll(result.arrivals, group->rank));
        return;
      case ArrivalTable::Outcome::kConflict:
        FinishAll(
            result.arrivals,
            absl::InternalError(absl::StrCat(
                name(),
                ": The devices of a group must run the same step. Received: "
                "two steps that run collective ",
                instance, " of group ", group->key, " at the same time.")));
        return;
      case ArrivalTable::Outcome::kWithdrawn:
        FinishAll(result.arrivals, absl::CancelledError(absl::StrCat(
                                       name(), ": The step is cancelled.")));
        return;
      case ArrivalTable::Outcome::kClosed:
        FinishAll(result.arrivals, group->meetings->status());
        return;
    }
  }

  // Computes the result, and sets the outputs of all devices. `own_rank` is the
  // rank of the device that runs this function.
  absl::Status ReduceAll(const Arrivals& arrivals, int own_rank) {
    return CatchAllTf([&] {
      std::vector<OpKernelContext*> contexts;
      std::vector<const void*> inputs;
      for (const auto& arrival : arrivals) {
        auto* ctx = static_cast<WaitingDevice*>(arrival.get())->ctx();
        contexts.push_back(ctx);
        inputs.push_back(ctx->input(0).data());
      }
      OpKernelContext* own = contexts[own_rank];
      const Tensor& input = own->input(0);
      for (OpKernelContext* other : contexts) {
        const Tensor& other_input = other->input(0);
        if (other_input.dtype() == input.dtype() &&
            other_input.shape() == input.shape()) {
          continue;
        }
        return absl::InvalidArgumentError(absl::StrCat(
            name(), ": The tensors of an all-reduce must have the same shape ",
            "and dtype on all devices. Received: ",
            input.DeviceSafeDebugString(), " on ", own->device()->name(),
            " and ", other_input.DeviceSafeDebugString(), " on ",
            other->device()->name()));
      }
      const int64_t size = input.NumElements();
      const auto chunk =
          ChunkElements(size, static_cast<int32_t>(contexts.size()));
      // All devices get the same buffer. An op changes the buffer of a tensor
      // only if it has the only reference to the buffer.
      Tensor* output = nullptr;
      TF_RETURN_IF_ERROR(own->forward_input_or_allocate_output(
          {0}, 0, input.shape(), &output));
      {
        // The threads of TensorFlow's collectives replace subnormal values by
        // 0. This thread can be any thread.
        tsl::port::ScopedFlushDenormal flush_subnormal_values;
        Reduce(reduction_, inputs, size, chunk, TfParallelFor(own),
               output->data());
      }
      for (OpKernelContext* other : contexts) {
        if (other != own) other->set_output(0, *output);
      }
      return absl::OkStatus();
    });
  }

  std::unique_ptr<OpKernel> original_;
  bool is_replaced_ = false;
  bool depends_on_instructions_ = false;
  Reduction reduction_ = {};

  std::mutex mutex_;
  // The last group. It is always the same in a function of DTensor.
  std::shared_ptr<const DeviceGroup> group_;
};

REGISTER_KERNEL_BUILDER(
    Name("CollectiveReduceV2")
        .Device(tensorflow::DEVICE_CPU)
        .AttrConstraint<std::string>(kHint, std::string(kHintOfDTensor))
        .Priority(1),
    LocalReduceOp);

}  // namespace
}  // namespace layoutmap
