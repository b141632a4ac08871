// Kernels that pass gradients to the host engine and update the tables.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/row_type.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/engine/marks.h"
#include "cc/core/engine/token_steps.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/steps/step.h"
#include "cc/kernels/engine/engine_resource.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace layoutmap {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Base class of ops that receive gradients or update the tables.
class GradientsOp : public EngineOp {
 public:
  using EngineOp::EngineOp;

 protected:
  // Applies the update of `step` to the variables in the inputs `shards` and
  // `slots`. The variables in the input `rounding_steps` contain the numbers of
  // earlier updates.
  static absl::Status RunUpdate(OpKernelContext* ctx, EngineResource& resource,
                                const HostEngine::Step& step) {
    constexpr char kNeeds[] = "This engine's tables need";
    const HostEngine& engine = resource.engine();
    const std::vector<TableSpec>& specs = engine.config().tables;
    OpInputList shard_handles, slot_handles, count_handles;
    TF_RETURN_IF_ERROR(ctx->input_list("shards", &shard_handles));
    TF_RETURN_IF_ERROR(ctx->input_list("slots", &slot_handles));
    TF_RETURN_IF_ERROR(ctx->input_list("rounding_steps", &count_handles));
    int num_shards = 0, num_slot_shards = 0, num_counts = 0;
    for (const TableSpec& table : specs) {
      num_shards += table.partition.num_shards();
      num_slot_shards +=
          NumSlots(table.optimizer) * table.partition.num_shards();
      num_counts += table.row_type != RowType::kFloat32;
    }
    TF_RETURN_IF_ERROR(
        CheckNumVariables(kNeeds, "shards", num_shards, shard_handles.size()));
    TF_RETURN_IF_ERROR(CheckNumVariables(kNeeds, "slots", num_slot_shards,
                                         slot_handles.size()));
    TF_RETURN_IF_ERROR(CheckNumVariables(kNeeds, "rounding_steps", num_counts,
                                         count_handles.size()));
    LockedShards shards;
    TF_RETURN_IF_ERROR(shards.Lock(ctx, {"shards", "slots", "rounding_steps"},
                                   LockedShards::Mode::kExclusive));
    std::vector<HostEngine::TableViews> tables(specs.size());
    int first = 0;
    for (size_t t = 0; t < specs.size(); ++t) {
      if (specs[t].row_type == RowType::kFloat32) {
        TF_RETURN_IF_ERROR(
            shards.MutableView(ctx, first, specs[t].name, specs[t].partition,
                               {specs[t].dim}, &tables[t].table));
      } else {
        TF_RETURN_IF_ERROR(shards.MutableView(
            ctx, first, specs[t].name, specs[t].partition, {specs[t].dim},
            &tables[t].half_table, HalfDtype(specs[t])));
      }
      first += specs[t].partition.num_shards();
      tables[t].hyperparameters = step.hyperparameters[t];
    }
    for (size_t t = 0; t < specs.size(); ++t) {
      tables[t].slots.resize(NumSlots(specs[t].optimizer));
      for (size_t j = 0; j < tables[t].slots.size(); ++j) {
        const int64_t dim = SlotDim(specs[t].optimizer, j, specs[t].dim);
        TF_RETURN_IF_ERROR(
            shards.MutableView(ctx, first, specs[t].name + " (slot variable)",
                               specs[t].partition, {dim}, &tables[t].slots[j]));
        first += specs[t].partition.num_shards();
      }
    }
    std::vector<int64_t*> counts;
    for (size_t t = 0; t < specs.size(); ++t) {
      if (specs[t].row_type == RowType::kFloat32) continue;
      int64_t* count;
      TF_RETURN_IF_ERROR(
          shards.MutableCount(ctx, first++, specs[t].name, &count));
      tables[t].num_updates = *count;
      counts.push_back(count);
    }
    resource.memory().See(shards.Memory());
    TF_RETURN_IF_ERROR(ToTf(engine.Update(
        step, tables, RowKernelsFor(CurrentCpuLevel()), TfParallelFor(ctx))));
    for (int64_t* count : counts) ++*count;
    for (size_t t = 0; t < specs.size(); ++t) {
      resource.changed().Note(static_cast<int32_t>(t), step.tables[t].rows);
    }
    return absl::OkStatus();
  }

  // Reads the input `gradients`.
  static absl::Status ReadGradients(OpKernelContext* ctx,
                                    const EngineConfig& config,
                                    BatchGradients* batch) {
    OpInputList gradients;
    TF_RETURN_IF_ERROR(ctx->input_list("gradients", &gradients));
    TF_RETURN_IF_ERROR(CheckListSize("features", "gradients",
                                     config.features.size(), gradients.size()));
    auto tensors = std::make_shared<std::vector<Tensor>>();
    for (int f = 0; f < gradients.size(); ++f) {
      TF_RETURN_IF_ERROR(CheckGradient(config, f, gradients[f]));
      tensors->push_back(gradients[f]);
      batch->features.push_back(View<float>(gradients[f]));
    }
    batch->keep_alive = std::move(tensors);
    return absl::OkStatus();
  }

  // Reads the input `hyperparameters`. The update uses only the values of the
  // last replica. Each replica checks its own values, so that the call with
  // invalid values returns the error.
  static absl::Status ReadHyperparameters(
      OpKernelContext* ctx, const EngineConfig& config,
      std::vector<std::vector<float>>* values) {
    OpInputList hyperparameters;
    TF_RETURN_IF_ERROR(ctx->input_list("hyperparameters", &hyperparameters));
    const std::vector<TableSpec>& tables = config.tables;
    TF_RETURN_IF_ERROR(CheckListSize("tables", "hyperparameters", tables.size(),
                                     hyperparameters.size()));
    for (int t = 0; t < hyperparameters.size(); ++t) {
      TF_RETURN_IF_ERROR(CheckRank("hyperparameters", hyperparameters[t], 1));
      TF_RETURN_IF_ERROR(
          ToTf(CheckHyperparameters(tables[t].optimizer, tables[t].name,
                                    View<float>(hyperparameters[t]))));
      const auto flat = hyperparameters[t].flat<float>();
      values->emplace_back(flat.data(), flat.data() + flat.size());
    }
    return absl::OkStatus();
  }

 private:
  // Checks the shape of a gradient, except for the number of samples. The
  // engine checks the number of samples.
  static absl::Status CheckGradient(const EngineConfig& config, int f,
                                    const Tensor& gradient) {
    const int64_t length = config.features[f].max_sequence_length;
    const int rank = length > 0 ? 3 : 2;
    if (gradient.dims() == rank &&
        gradient.dim_size(rank - 1) == config.dim_of_feature(f) &&
        (length == 0 || gradient.dim_size(1) == length)) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "Feature '", config.features[f].feature,
        "': its gradient must be shaped like its activation, [num_samples, ",
        length > 0 ? absl::StrCat(length, ", ") : "", config.dim_of_feature(f),
        "]. Received: shape ", gradient.shape().DebugString()));
  }
};

class ApplyStepOp : public GradientsOp {
 public:
  using GradientsOp::GradientsOp;

  absl::Status RunOn(OpKernelContext* ctx, EngineResource& resource,
                     int32_t replica) override {
    HostEngine& engine = resource.engine();
    BatchGradients batch;
    TF_RETURN_IF_ERROR(ReadGradients(ctx, engine.config(), &batch));
    TF_RETURN_IF_ERROR(
        ReadHyperparameters(ctx, engine.config(), &batch.hyperparameters));
    std::shared_ptr<HostEngine::Step> step;
    TF_RETURN_IF_ERROR(
        ToTf(engine.BeginApply(replica, std::move(batch), &step)));
    // No update can run yet.
    if (step == nullptr) return absl::OkStatus();
    return RunAndFinish(
        [&] { return RunUpdate(ctx, resource, *step); },
        [&](bool updated) { engine.FinishApply(replica, updated); });
  }
};

class FollowStepOp : public GradientsOp {
 public:
  using GradientsOp::GradientsOp;

  absl::Status RunOn(OpKernelContext* ctx, EngineResource& resource,
                     int32_t replica) override {
    int64_t token;
    BatchGradients batch;
    const Tensor* coordinates;
    TF_RETURN_IF_ERROR(GetScalar(ctx, "token", &token));
    TF_RETURN_IF_ERROR(ctx->input("coordinates", &coordinates));
    TF_RETURN_IF_ERROR(ReadGradients(ctx, resource.engine().config(), &batch));
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(
        "mark", TensorShape({kMarkRows, kMarkColumns}), &out));
    Mark mark;
    TF_RETURN_IF_ERROR(ToTf(resource.tokens().Follow(
        replica, token, std::move(batch), View<float>(*coordinates),
        TfParallelFor(ctx), &mark)));
    std::copy(mark.begin(), mark.end(), out->flat<float>().data());
    return absl::OkStatus();
  }
};

class ApplyFollowedOp : public GradientsOp {
 public:
  using GradientsOp::GradientsOp;

  absl::Status RunOn(OpKernelContext* ctx, EngineResource& resource,
                     int32_t replica) override {
    const Tensor* marks;
    TF_RETURN_IF_ERROR(ctx->input("marks", &marks));
    TokenSteps& tokens = resource.tokens();
    const HostEngine& engine = resource.engine();
    std::vector<std::vector<float>> hyperparameters;
    TF_RETURN_IF_ERROR(
        ReadHyperparameters(ctx, engine.config(), &hyperparameters));
    std::shared_ptr<HostEngine::Step> step;
    TF_RETURN_IF_ERROR(ToTf(tokens.BeginApply(
        replica, View<float>(*marks), std::move(hyperparameters), &step)));
    // Either no update can run yet, or the call of another replica runs the
    // update.
    if (step == nullptr) return absl::OkStatus();
    return RunAndFinish(
        [&] {
          tokens.Prepare(step.get(), TfParallelFor(ctx));
          return RunUpdate(ctx, resource, *step);
        },
        [&](bool updated) { tokens.FinishApply(replica, *step, updated); });
  }
};

class LandUpdateOp : public GradientsOp {
 public:
  explicit LandUpdateOp(OpKernelConstruction* ctx) : GradientsOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("always", &always_));
  }

  absl::Status RunOn(OpKernelContext* ctx, EngineResource& resource,
                     int32_t replica) override {
    HostEngine& engine = resource.engine();
    std::shared_ptr<HostEngine::Step> step;
    TF_RETURN_IF_ERROR(ToTf(engine.BeginLanding(replica, always_, &step)));
    if (step == nullptr) return absl::OkStatus();
    return RunAndFinish([&] { return RunUpdate(ctx, resource, *step); },
                        [&](bool updated) { engine.FinishLanding(updated); });
  }

 private:
  bool always_;
};

absl::Status CheckSize(const char* name, const Tensor& tensor, int64_t size) {
  if (tensor.NumElements() == size) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("`", name, "` must have ", size,
                   " values. Received: ", tensor.NumElements()));
}

class IssueMarkOp : public Kernel {
 public:
  explicit IssueMarkOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("numbers", &numbers_));
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor* coordinates;
    OP_REQUIRES_OK(ctx, ctx->input("coordinates", &coordinates));
    const auto num_gradients = static_cast<int64_t>(numbers_.size());
    OP_REQUIRES_OK(ctx, CheckSize("coordinates", *coordinates, num_gradients));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(
                       "mark", TensorShape({kMarkRows, kMarkColumns}), &out));
    const Mark mark = IssueMark(numbers_, View<float>(*coordinates));
    std::copy(mark.begin(), mark.end(), out->flat<float>().data());
  }

 private:
  std::vector<int64_t> numbers_;
};

class ReadMarksOp : public Kernel {
 public:
  explicit ReadMarksOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("numbers", &numbers_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("where", &where_));
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor* marks;
    OpInputList tensors;
    OP_REQUIRES_OK(ctx, ctx->input("marks", &marks));
    OP_REQUIRES_OK(ctx, CheckSize("marks", *marks, kMarkSize));
    OP_REQUIRES_OK(ctx, ctx->input_list("issued", &tensors));
    OP_REQUIRES(ctx, static_cast<int>(numbers_.size()) == tensors.size(),
                absl::InvalidArgumentError(
                    absl::StrCat("`numbers` must have ", tensors.size(),
                                 " values. Received: ", numbers_.size())));
    std::vector<Mark> values(tensors.size());
    std::vector<IssuedMark> issued;
    for (int i = 0; i < tensors.size(); ++i) {
      OP_REQUIRES_OK(ctx, CheckSize("issued", tensors[i], kMarkSize));
      const Span<const float> one = View<float>(tensors[i]);
      std::copy(one.begin(), one.end(), values[i].begin());
      issued.push_back({numbers_[i], &values[i]});
    }
    std::vector<MarkFactor> found;
    OP_REQUIRES_OK(
        ctx, ToTf(ReadMarks(issued, View<float>(*marks), where_, &found)));
    std::vector<float> factors;
    for (const int64_t number : numbers_) {
      factors.push_back(0.0f);
      for (const MarkFactor& one : found) {
        if (one.number == number) factors.back() = one.factor;
      }
    }
    OP_REQUIRES_OK(ctx, SetVector<float>(ctx, "factors", factors));
  }

 private:
  std::vector<int64_t> numbers_;
  std::string where_;
};

LM_REGISTER_KERNEL("ApplyStep", ApplyStepOp);
LM_REGISTER_KERNEL("IssueMark", IssueMarkOp);
LM_REGISTER_KERNEL("ReadMarks", ReadMarksOp);
LM_REGISTER_KERNEL("FollowStep", FollowStepOp);
LM_REGISTER_KERNEL("ApplyFollowed", ApplyFollowedOp);
LM_REGISTER_KERNEL("LandUpdate", LandUpdateOp);

}  // namespace
}  // namespace layoutmap
