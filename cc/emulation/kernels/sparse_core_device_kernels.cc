// CPU kernels of TensorFlow's ops that run on the SparseCores of a TPU. The
// cores of the emulated TPU represent chips. The calls of all chips in a step
// wait for each other, because each chip reads and updates rows of all chips.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/catch_all.h"
#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/tables/quantization.h"
#include "cc/emulation/kernels/earlier_tables.h"
#include "cc/emulation/kernels/sparse_core_attrs.h"
#include "cc/emulation/kernels/tpu_system.h"
#include "cc/emulation/pending_calls.h"
#include "cc/emulation/sparse_core/device_step.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace layoutmap {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::DEVICE_CPU;
using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// The memory of one chip in one op. The context of the op owns the memory, and
// `table` owns the table of a lookup.
struct ChipCall {
  DeviceSettings settings;
  ChipIds ids;
  // The table and the slot variables. A lookup does not write them.
  std::vector<float*> tables;
  Tensor table;
  // Activations of a lookup, or gradients of an update.
  float* samples = nullptr;
  float learning_rate = 0;
};

// The calls of all chips for one op of a step.
struct Meeting {
  std::mutex mutex;
  // The call of each chip, or null. A call that ends early is removed.
  std::vector<const ChipCall*> calls;
  bool is_done = false;
  Status status;
  // Whether the call of each chip has begun and has ended. `Meetings` guards
  // the values.
  std::vector<bool> has_joined;
  std::vector<bool> has_left;
};

// Identifies an op of a step: the step, the iteration of a loop, and the name
// of the op. Chips that run different programs wait until their deadline.
using MeetingKey = std::tuple<int64_t, uint64_t, int64_t, std::string>;

class Meetings {
 public:
  static Meetings& Get() {
    // Calls may still be waiting when the process ends.
    static Meetings* meetings = new Meetings;
    return *meetings;
  }

  // Returns the next meeting of the chip. Calls of a chip with the same key,
  // for example in a loop, must run one after the other; otherwise, the result
  // is null.
  std::shared_ptr<Meeting> Join(const MeetingKey& key, int64_t chip,
                                int64_t num_chips) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& meetings = meetings_[key];
    for (const std::shared_ptr<Meeting>& meeting : meetings) {
      if (!meeting->has_joined[chip]) {
        meeting->has_joined[chip] = true;
        return meeting;
      }
      if (!meeting->has_left[chip]) return nullptr;
    }
    auto meeting = std::make_shared<Meeting>();
    meeting->calls.resize(num_chips);
    meeting->has_joined.resize(num_chips);
    meeting->has_left.resize(num_chips);
    meeting->has_joined[chip] = true;
    meetings.push_back(meeting);
    return meeting;
  }

  // Removes the meeting if all chips that joined it have left.
  void Leave(const MeetingKey& key, const std::shared_ptr<Meeting>& meeting,
             int64_t chip) {
    std::lock_guard<std::mutex> lock(mutex_);
    meeting->has_left[chip] = true;
    if (meeting->has_left != meeting->has_joined) return;
    auto& meetings = meetings_[key];
    meetings.erase(std::find(meetings.begin(), meetings.end(), meeting));
    if (meetings.empty()) meetings_.erase(key);
  }

  PendingCalls& calls() { return calls_; }

 private:
  std::mutex mutex_;
  std::map<MeetingKey, std::vector<std::shared_ptr<Meeting>>> meetings_;
  PendingCalls calls_;
};

// Returns the name of an op without the scope of its replica.
std::string NameInProgram(const std::string& name) {
  constexpr char kScope[] = "replica_";
  const size_t start = name.rfind(kScope);
  if (start == std::string::npos) return name;
  const size_t end = name.find('/', start);
  if (end == std::string::npos) return name;
  return name.substr(0, start) + name.substr(end + 1);
}

absl::Status CheckShape(const char* name, const Tensor& tensor,
                        const TensorShape& shape) {
  if (tensor.shape() == shape) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("`", name, "` must have the shape ", shape.DebugString(),
                   ". Received: ", tensor.shape().DebugString()));
}

bool IsSame(const DeviceSettings& a, const DeviceSettings& b) {
  return a.samples_per_chip == b.samples_per_chip &&
         a.rows_per_chip == b.rows_per_chip && a.dim == b.dim &&
         a.table == b.table;
}

// Base class of the lookup and the updates.
class DeviceOp : public AsyncOpKernel {
 public:
  explicit DeviceOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadLimits(ctx, &settings_));
    settings_.cores_per_chip = -1;
    if (ctx->HasAttr("num_sparsecores_per_device")) {
      OP_REQUIRES_OK(ctx, ctx->GetAttr("num_sparsecores_per_device",
                                       &settings_.cores_per_chip));
    }
    std::string mode;
    if (ctx->HasAttr("_embedding_pipelining")) {
      OP_REQUIRES_OK(ctx, ctx->GetAttr("_embedding_pipelining", &mode));
    }
    is_pipelined_ = mode == "forward" || mode == "backward";
    if (!is_pipelined_) return;
    // `EmulatedTPUStrategy` adds this attribute.
    OP_REQUIRES(ctx, ctx->HasAttr("_layout_map_table"),
                absl::UnimplementedError(
                    "The emulation supports "
                    "`pipeline_execution_with_tensor_core=True` only if the "
                    "function of `strategy.run` itself calls `TPUEmbeddingV2`, "
                    "and not a tf.function inside it"));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("_layout_map_table", &name_of_table_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    auto call = std::make_shared<ChipCall>();
    OP_REQUIRES_ASYNC(
        ctx, !is_pipelined_ || IsInLoop(ctx),
        absl::FailedPreconditionError(
            "`pipeline_execution_with_tensor_core=True` requires a loop of "
            "steps, for example `for _ in tf.range(n): strategy.run(...)` in a "
            "tf.function. The TPU compiler rejects other programs, because it "
            "moves the update of a step to the next iteration"),
        done);
    OP_REQUIRES_OK_ASYNC(ctx, CatchAllTf([&] { return Read(ctx, call.get()); }),
                         done);
    const int64_t chip = CoreOf(ctx);
    const int64_t num_chips = call->settings.num_chips;
    OP_REQUIRES_ASYNC(
        ctx, chip < num_chips,
        absl::InvalidArgumentError(absl::StrCat(
            "The op must run on a core of the emulated TPU, which has ",
            num_chips, " cores. Received: ", ctx->device()->name())),
        done);
    const auto frame = ctx->frame_iter();
    const MeetingKey key = {ctx->step_id(), frame.frame_id, frame.iter_id,
                            NameInProgram(name())};
    auto meeting = Meetings::Get().Join(key, chip, num_chips);
    OP_REQUIRES_ASYNC(
        ctx, meeting != nullptr,
        absl::FailedPreconditionError(absl::StrCat(
            type_string(), " must not run twice at the same time on core ",
            chip, " (table ", settings_.table, ")")),
        done);
    Wait(ctx, std::move(done), key, std::move(meeting), chip, std::move(call));
  }

 protected:
  // Reads the other inputs, and allocates the outputs.
  virtual absl::Status ReadOthers(OpKernelContext* ctx, ChipCall* call) = 0;
  virtual Status Run(const std::vector<const ChipCall*>& chips,
                     const DeviceIds& ids,
                     const ParallelFor& parallel_for) const = 0;

  // Saves the table before an update, if lookups are pipelined.
  void SaveTable(OpKernelContext* ctx, const Tensor& table) const {
    if (!is_pipelined_) return;
    EarlierTables::Get().Save(name_of_table_, CoreOf(ctx), IterationOf(ctx),
                              table);
  }

  // Returns the table that a lookup uses.
  Tensor TableOfLookup(OpKernelContext* ctx, const Tensor& table) const {
    if (!is_pipelined_) return table;
    return EarlierTables::Get().Find(name_of_table_, CoreOf(ctx),
                                     IterationOf(ctx), table);
  }

 private:
  static Iteration IterationOf(OpKernelContext* ctx) {
    const auto frame = ctx->frame_iter();
    return {ctx->step_id(), frame.frame_id, frame.iter_id};
  }

  // The frame 0 is a function, and an op outside of functions has no frame.
  static bool IsInLoop(OpKernelContext* ctx) {
    const auto frame = ctx->frame_iter();
    return frame.frame_id != 0 && frame.iter_id >= 0;
  }

  absl::Status Read(OpKernelContext* ctx, ChipCall* call) {
    call->settings = settings_;
    call->settings.num_chips = TpuSystem::Get().num_cores();
    if (call->settings.num_chips == 0) {
      return absl::FailedPreconditionError(
          "The emulated TPU is not set up; call `tlm.emulation.enable` first");
    }
    const int64_t of_system = TpuSystem::Get().sparse_cores_per_chip();
    if (settings_.cores_per_chip == -1) {
      call->settings.cores_per_chip = of_system;
    } else if (of_system != 0 && of_system != settings_.cores_per_chip) {
      return absl::InvalidArgumentError(absl::StrCat(
          "`num_sparsecores_per_device` must be the number of SparseCores of "
          "an emulated chip, ",
          of_system, ". Received: ", settings_.cores_per_chip));
    }
    if (call->settings.cores_per_chip == 0) {
      return absl::FailedPreconditionError(
          "The emulated TPU has no SparseCores; pass `tpu` to "
          "`tlm.emulation.enable`");
    }
    const Tensor* table;
    TF_RETURN_IF_ERROR(GetInput(ctx, "embedding_table", 2, &table));
    call->settings.rows_per_chip = table->dim_size(0);
    call->settings.dim = table->dim_size(1);
    const Tensor* tensor;
    TF_RETURN_IF_ERROR(GetInput(ctx, "row_pointers", 1, &tensor));
    call->ids.row_pointers = View<int32_t>(*tensor);
    TF_RETURN_IF_ERROR(GetInput(ctx, "sorted_sample_ids", 1, &tensor));
    call->ids.rows = View<int32_t>(*tensor);
    TF_RETURN_IF_ERROR(GetInput(ctx, "sorted_token_ids", 1, &tensor));
    call->ids.cols = View<int32_t>(*tensor);
    TF_RETURN_IF_ERROR(GetInput(ctx, "sorted_gains", 1, &tensor));
    call->ids.gains = View<float>(*tensor);
    int32_t num_minibatches;
    TF_RETURN_IF_ERROR(GetScalar(
        ctx, "num_minibatches_per_physical_sparse_core", &num_minibatches));
    call->ids.num_minibatches = num_minibatches;
    TF_RETURN_IF_ERROR(ReadOthers(ctx, call));
    return ToTf(CheckDeviceSettings(call->settings));
  }

  // Runs the step if the calls of all chips have arrived.
  Status Attempt(Meeting* meeting, int64_t chip, const ChipCall* call,
                 const ParallelFor& parallel_for) const {
    std::lock_guard<std::mutex> lock(meeting->mutex);
    if (meeting->is_done) return meeting->status;
    meeting->calls[chip] = call;
    int64_t num_missing = 0;
    for (const ChipCall* other : meeting->calls) num_missing += !other;
    if (num_missing > 0) {
      return NotYet("the same op has not run on " +
                    std::to_string(num_missing) + " other cores");
    }
    meeting->status =
        CatchAll([&] { return RunAll(meeting->calls, parallel_for); });
    meeting->is_done = true;
    return meeting->status;
  }

  Status RunAll(const std::vector<const ChipCall*>& chips,
                const ParallelFor& parallel_for) const {
    std::vector<ChipIds> buffers;
    for (const ChipCall* chip : chips) {
      if (!IsSame(chip->settings, chips[0]->settings)) {
        return InvalidArgument(
            "The tables and samples of all cores must have the same shapes");
      }
      buffers.push_back(chip->ids);
    }
    DeviceIds ids;
    LM_RETURN_IF_ERROR(ReadDeviceIds(chips[0]->settings, buffers, &ids));
    return Run(chips, ids, parallel_for);
  }

  void Wait(OpKernelContext* ctx, DoneCallback done, const MeetingKey& key,
            std::shared_ptr<Meeting> meeting, int64_t chip,
            std::shared_ptr<ChipCall> call) {
    // The meetings are never destroyed.
    std::shared_ptr<PendingCalls> calls(std::shared_ptr<void>(),
                                        &Meetings::Get().calls());
    RunWhenReady(
        ctx, std::move(done), std::move(calls),
        absl::StrCat(type_string(), " of core ", chip, " (table ",
                     settings_.table, ")"),
        [this, meeting, chip, call,
         parallel_for = TfParallelFor(ctx)](absl::Status*) {
          return Attempt(meeting.get(), chip, call.get(), parallel_for);
        },
        [key, meeting, chip, call] {
          {
            // Waits until no other chip uses the memory of this call.
            std::lock_guard<std::mutex> lock(meeting->mutex);
            if (meeting->calls[chip] == call.get()) {
              meeting->calls[chip] = nullptr;
            }
          }
          Meetings::Get().Leave(key, meeting, chip);
        },
        [] { return std::string(); });
  }

  DeviceSettings settings_;
  // Whether a TPU runs the update of a step after the lookup of the next step.
  bool is_pipelined_ = false;
  std::string name_of_table_;
};

class LookUpOp : public DeviceOp {
 public:
  explicit LookUpOp(OpKernelConstruction* ctx) : DeviceOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("input_size", &num_samples_));
    float low;
    float high;
    int64_t num_buckets;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("quantization_config_low", &low));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("quantization_config_high", &high));
    OP_REQUIRES_OK(
        ctx, ctx->GetAttr("quantization_config_num_buckets", &num_buckets));
    is_quantized_ = num_buckets > 0;
    if (!is_quantized_) return;
    std::string table;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table_name", &table));
    OP_REQUIRES_OK(ctx, ToTf(MakeQuantization(low, high, num_buckets, table,
                                              &quantization_)));
  }

 protected:
  absl::Status ReadOthers(OpKernelContext* ctx, ChipCall* call) override {
    call->settings.samples_per_chip = num_samples_;
    const Tensor* table;
    TF_RETURN_IF_ERROR(ctx->input("embedding_table", &table));
    call->table = TableOfLookup(ctx, *table);
    call->tables = {const_cast<float*>(View<float>(call->table).data())};
    Tensor* activations = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(
        "activations", TensorShape({num_samples_, call->settings.dim}),
        &activations));
    call->samples = activations->flat<float>().data();
    return absl::OkStatus();
  }

  Status Run(const std::vector<const ChipCall*>& chips, const DeviceIds& ids,
             const ParallelFor& parallel_for) const override {
    std::vector<const float*> tables;
    std::vector<float*> activations;
    for (const ChipCall* chip : chips) {
      tables.push_back(chip->tables[0]);
      activations.push_back(chip->samples);
    }
    LookUpOnDevice(chips[0]->settings, ids, tables,
                   is_quantized_ ? &quantization_ : nullptr,
                   RowKernelsFor(CurrentCpuLevel()), parallel_for, activations);
    return {};
  }

 private:
  int64_t num_samples_;
  bool is_quantized_;
  Quantization quantization_ = {};
};

// The names of the slot variables and the attributes of an update op. The
// attributes are hyperparameters after the learning rate, in the order of the
// update rule. The name "1" represents the number 1.
struct UpdateInfo {
  Optimizer optimizer;
  std::vector<const char*> slots;
  std::vector<const char*> attributes;
};

UpdateInfo InfoOf(Optimizer optimizer) {
  switch (optimizer) {
    case Optimizer::kAdagrad:
      return {optimizer, {"accumulator"}, {}};
    case Optimizer::kAdagradMomentum:
      return {optimizer,
              {"accumulator", "momenta"},
              {"beta1", "use_nesterov", "exponent", "beta2", "epsilon"}};
    case Optimizer::kAdam:
      // SparseCores update the rows of the batch only.
      return {optimizer,
              {"momenta", "velocity"},
              {"beta1", "beta2", "epsilon", "use_sum_inside_sqrt", "1"}};
    case Optimizer::kFtrl:
      return {optimizer,
              {"accumulator", "linear"},
              {"learning_rate_power", "l1_regularization_strength",
               "l2_regularization_strength", "beta",
               "multiply_linear_by_learning_rate"}};
    default:
      return {optimizer, {}, {}};
  }
}

template <Optimizer optimizer>
class UpdateOp : public DeviceOp {
 public:
  explicit UpdateOp(OpKernelConstruction* ctx)
      : DeviceOp(ctx), info_(InfoOf(optimizer)), hyperparameters_({0.0f}) {
    for (const char* name : info_.attributes) {
      float value = 1;
      if (name[0] != '1' || name[1] != 0) {
        OP_REQUIRES_OK(ctx, GetNumber(ctx, name, &value));
      }
      hyperparameters_.push_back(value);
    }
    float low;
    float high;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("clip_weight_min", &low));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("clip_weight_max", &high));
    OP_REQUIRES(ctx, low <= high,
                absl::InvalidArgumentError(
                    absl::StrCat("clip_weight_min must be smaller or equal to "
                                 "clip_weight_max but got clip_weight_min as ",
                                 low, " and clip_weight_max as ", high, ".")));
    if (std::isinf(low) && std::isinf(high)) return;
    // The modifiers of cc/core/optimizers/optimizer.h.
    const std::array<float, kNumModifiers> modifiers = {
        -INFINITY, INFINITY, 0, 0, low, high, 1};
    hyperparameters_.insert(hyperparameters_.end(), modifiers.begin(),
                            modifiers.end());
  }

 protected:
  absl::Status ReadOthers(OpKernelContext* ctx, ChipCall* call) override {
    TF_RETURN_IF_ERROR(GetScalar(ctx, "learning_rate", &call->learning_rate));
    const Tensor* gradients;
    TF_RETURN_IF_ERROR(GetInput(ctx, "activation_gradients", 2, &gradients));
    call->settings.samples_per_chip = gradients->dim_size(0);
    TF_RETURN_IF_ERROR(
        CheckShape("activation_gradients", *gradients,
                   TensorShape({gradients->dim_size(0), call->settings.dim})));
    call->samples = const_cast<float*>(View<float>(*gradients).data());
    std::vector<const char*> names = {"embedding_table"};
    names.insert(names.end(), info_.slots.begin(), info_.slots.end());
    const TensorShape shape({call->settings.rows_per_chip, call->settings.dim});
    for (size_t i = 0; i < names.size(); ++i) {
      const Tensor* input;
      TF_RETURN_IF_ERROR(ctx->input(names[i], &input));
      TF_RETURN_IF_ERROR(CheckShape(names[i], *input, shape));
      if (i == 0) SaveTable(ctx, *input);
      int index;
      int end;
      TF_RETURN_IF_ERROR(InputRange(names[i], &index, &end));
      Tensor* output = nullptr;
      const float* before = input->flat<float>().data();
      const int64_t size = input->NumElements();
      TF_RETURN_IF_ERROR(ctx->forward_input_or_allocate_output(
          {index}, static_cast<int>(i), shape, &output));
      float* after = output->flat<float>().data();
      if (after != before) std::copy_n(before, size, after);
      call->tables.push_back(after);
    }
    return absl::OkStatus();
  }

  Status Run(const std::vector<const ChipCall*>& chips, const DeviceIds& ids,
             const ParallelFor& parallel_for) const override {
    std::vector<float> hyperparameters = hyperparameters_;
    hyperparameters[0] = chips[0]->learning_rate;
    LM_RETURN_IF_ERROR(CheckHyperparameters(optimizer, chips[0]->settings.table,
                                            hyperparameters));
    std::vector<const float*> gradients;
    std::vector<float*> tables;
    std::vector<std::vector<float*>> slots(info_.slots.size());
    for (const ChipCall* chip : chips) {
      if (chip->learning_rate != hyperparameters[0]) {
        return InvalidArgument("All cores must have the same learning rate");
      }
      gradients.push_back(chip->samples);
      tables.push_back(chip->tables[0]);
      for (size_t slot = 0; slot < slots.size(); ++slot) {
        slots[slot].push_back(chip->tables[slot + 1]);
      }
    }
    UpdateOnDevice(chips[0]->settings, ids, gradients, optimizer,
                   hyperparameters, RowKernelsFor(CurrentCpuLevel()),
                   parallel_for, tables, slots);
    return {};
  }

 private:
  static absl::Status GetNumber(OpKernelConstruction* ctx, const char* name,
                                float* value) {
    bool flag;
    if (ctx->GetAttr(name, &flag).ok()) {
      *value = flag ? 1 : 0;
      return absl::OkStatus();
    }
    return ctx->GetAttr(name, value);
  }

  const UpdateInfo info_;
  std::vector<float> hyperparameters_;
};

// Passes the tensors on. The emulated chips read the memory of the host.
class PassOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    OpInputList tensors;
    OpOutputList outputs;
    OP_REQUIRES_OK(ctx, ctx->input_list("tensors", &tensors));
    OP_REQUIRES_OK(ctx, ctx->output_list("tpu_tensors", &outputs));
    for (int i = 0; i < tensors.size(); ++i) outputs.set(i, tensors[i]);
  }
};

REGISTER_KERNEL_BUILDER(Name("TPUCopyWithDynamicShape").Device(DEVICE_CPU),
                        PassOp);
REGISTER_KERNEL_BUILDER(
    Name("TPUAnnotateTensorsWithDynamicShape").Device(DEVICE_CPU), PassOp);
REGISTER_KERNEL_BUILDER(
    Name("XlaSparseDenseMatmulWithStaticBufferSize").Device(DEVICE_CPU),
    LookUpOp);

#define LM_REGISTER_UPDATE(name, optimizer)                           \
  REGISTER_KERNEL_BUILDER(                                            \
      Name("XlaSparseDenseMatmulGradWith" name "AndStaticBufferSize") \
          .Device(DEVICE_CPU),                                        \
      UpdateOp<optimizer>)

LM_REGISTER_UPDATE("Sgd", Optimizer::kSgd);
LM_REGISTER_UPDATE("Adagrad", Optimizer::kAdagrad);
LM_REGISTER_UPDATE("AdagradMomentum", Optimizer::kAdagradMomentum);
LM_REGISTER_UPDATE("Adam", Optimizer::kAdam);
LM_REGISTER_UPDATE("Ftrl", Optimizer::kFtrl);

}  // namespace
}  // namespace layoutmap
