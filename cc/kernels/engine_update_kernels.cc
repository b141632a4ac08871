// The way back: gradients into the host engine, and updates onto the tables.

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/kernels/engine_resource.h"
#include "cc/kernels/locked_shards.h"

namespace layoutmap {
namespace {

using tensorflow::DEVICE_CPU;
using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Runs the update of `step` on the variables of the op's inputs `shards` and
// `slots`.
absl::Status RunUpdate(OpKernelContext* ctx, const HostEngine& engine,
                       const HostEngine::Step& step) {
  const std::vector<TableSpec>& specs = engine.config().tables;
  OpInputList shard_handles, slot_handles, count_handles;
  TF_RETURN_IF_ERROR(ctx->input_list("shards", &shard_handles));
  TF_RETURN_IF_ERROR(ctx->input_list("slots", &slot_handles));
  TF_RETURN_IF_ERROR(ctx->input_list("rounding_steps", &count_handles));
  int num_shards = 0, num_slot_shards = 0, num_counts = 0;
  for (const TableSpec& table : specs) {
    num_shards += table.partition.num_shards();
    num_slot_shards += NumSlots(table.optimizer) * table.partition.num_shards();
    num_counts += table.row_type != RowType::kFloat32;
  }
  TF_RETURN_IF_ERROR(CheckAllUsed("shards", num_shards, shard_handles.size()));
  TF_RETURN_IF_ERROR(
      CheckAllUsed("slots", num_slot_shards, slot_handles.size()));
  TF_RETURN_IF_ERROR(
      CheckAllUsed("rounding_steps", num_counts, count_handles.size()));
  LockedShards shards;
  TF_RETURN_IF_ERROR(shards.Lock(ctx, {"shards", "slots", "rounding_steps"},
                                 LockedShards::Mode::kExclusive));
  std::vector<HostEngine::TableViews> tables(specs.size());
  int first = 0;
  for (size_t t = 0; t < specs.size(); ++t) {
    if (specs[t].row_type == RowType::kFloat32) {
      TF_RETURN_IF_ERROR(shards.MutableView(ctx, first, specs[t].name,
                                            specs[t].partition, {specs[t].dim},
                                            &tables[t].table));
    } else {
      TF_RETURN_IF_ERROR(shards.MutableHalfView(
          ctx, first, specs[t].name, specs[t].partition, specs[t].row_type,
          {specs[t].dim}, &tables[t].half_table));
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
  TF_RETURN_IF_ERROR(ToTf(engine.Update(
      step, tables, RowKernelsFor(CurrentCpuLevel()), TfParallelFor(ctx))));
  for (int64_t* count : counts) ++*count;
  return absl::OkStatus();
}

// An op that takes gradients.
class GradientsOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  static absl::Status ReadGradients(OpKernelContext* ctx,
                                    const EngineConfig& config,
                                    BatchGradients* batch) {
    OpInputList gradients;
    TF_RETURN_IF_ERROR(ctx->input_list("gradients", &gradients));
    const size_t num_features = config.features.size();
    if (gradients.size() != static_cast<int>(num_features)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "This engine has ", num_features,
          " features. Received: ", gradients.size(), " gradients"));
    }
    auto tensors = std::make_shared<std::vector<Tensor>>();
    for (int f = 0; f < gradients.size(); ++f) {
      TF_RETURN_IF_ERROR(CheckGradient(config, f, gradients[f]));
      tensors->push_back(gradients[f]);
      batch->features.push_back(View<float>(gradients[f]));
    }
    batch->keep_alive = std::move(tensors);
    return absl::OkStatus();
  }

 private:
  // The number of values is the engine's to check: it knows the samples.
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

// Of each replica, though those of the last one are used: a wrong value is
// refused where it comes in.
absl::Status ReadHyperparameters(OpKernelContext* ctx,
                                 const EngineConfig& config,
                                 std::vector<std::vector<float>>* values) {
  OpInputList hyperparameters;
  TF_RETURN_IF_ERROR(ctx->input_list("hyperparameters", &hyperparameters));
  const std::vector<TableSpec>& tables = config.tables;
  if (hyperparameters.size() != static_cast<int>(tables.size())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "This engine has ", tables.size(),
        " tables. Received: ", hyperparameters.size(), " hyperparameters"));
  }
  for (int t = 0; t < hyperparameters.size(); ++t) {
    TF_RETURN_IF_ERROR(CheckRank("hyperparameters", hyperparameters[t], 1));
    TF_RETURN_IF_ERROR(
        ToTf(CheckHyperparameters(tables[t].optimizer, tables[t].name,
                                  layoutmap::View<float>(hyperparameters[t]))));
    const auto flat = hyperparameters[t].flat<float>();
    values->emplace_back(flat.data(), flat.data() + flat.size());
  }
  return absl::OkStatus();
}

class ApplyStepOp : public GradientsOp {
 public:
  using GradientsOp::GradientsOp;

  void Run(OpKernelContext* ctx) override {
    EnginePtr resource;
    int32_t replica;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &resource));
    OP_REQUIRES_OK(ctx, GetReplica(ctx, &replica));
    HostEngine& engine = resource->engine();
    BatchGradients batch;
    OP_REQUIRES_OK(ctx, ReadGradients(ctx, engine.config(), &batch));
    OP_REQUIRES_OK(
        ctx, ReadHyperparameters(ctx, engine.config(), &batch.hyperparameters));
    std::shared_ptr<HostEngine::Step> step;
    OP_REQUIRES_OK(ctx,
                   ToTf(engine.BeginApply(replica, std::move(batch), &step)));
    if (step == nullptr) return;  // nothing lands yet
    const absl::Status status =
        Finished([&] { return RunUpdate(ctx, engine, *step); });
    engine.FinishApply(replica, status.ok());
    OP_REQUIRES_OK(ctx, status);
  }
};

class FollowStepOp : public GradientsOp {
 public:
  using GradientsOp::GradientsOp;

  void Run(OpKernelContext* ctx) override {
    EnginePtr resource;
    int32_t replica;
    const Tensor* token;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &resource));
    OP_REQUIRES_OK(ctx, GetReplica(ctx, &replica));
    OP_REQUIRES_OK(ctx, ctx->input("token", &token));
    OP_REQUIRES_OK(ctx, CheckRank("token", *token, 0));
    BatchGradients batch;
    OP_REQUIRES_OK(ctx,
                   ReadGradients(ctx, resource->engine().config(), &batch));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(
                            0, TensorShape({TokenSteps::kMaxOpen, 2}), &out));
    TokenSteps::Mark mark;
    OP_REQUIRES_OK(
        ctx, ToTf(resource->tokens().Follow(replica, token->scalar<int64_t>()(),
                                            std::move(batch), &mark)));
    std::copy(mark.begin(), mark.end(), out->flat<float>().data());
  }
};

class ApplyFollowedOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    EnginePtr resource;
    int32_t replica;
    const Tensor* marks;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &resource));
    OP_REQUIRES_OK(ctx, GetReplica(ctx, &replica));
    OP_REQUIRES_OK(ctx, ctx->input("marks", &marks));
    TokenSteps& tokens = resource->tokens();
    const HostEngine& engine = resource->engine();
    std::vector<std::vector<float>> hyperparameters;
    OP_REQUIRES_OK(ctx,
                   ReadHyperparameters(ctx, engine.config(), &hyperparameters));
    std::shared_ptr<HostEngine::Step> step;
    OP_REQUIRES_OK(ctx,
                   ToTf(tokens.BeginApply(replica, View<float>(*marks),
                                          std::move(hyperparameters), &step)));
    if (step == nullptr) return;  // nothing to apply, or not by this replica
    const absl::Status status = Finished([&] {
      tokens.Prepare(step.get(), TfParallelFor(ctx));
      return RunUpdate(ctx, engine, *step);
    });
    tokens.FinishApply(replica, *step, status.ok());
    OP_REQUIRES_OK(ctx, status);
  }
};

class LandUpdateOp : public Kernel {
 public:
  explicit LandUpdateOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("always", &always_));
  }

  void Run(OpKernelContext* ctx) override {
    EnginePtr resource;
    int32_t replica;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &resource));
    OP_REQUIRES_OK(ctx, GetReplica(ctx, &replica));
    HostEngine& engine = resource->engine();
    std::shared_ptr<HostEngine::Step> step;
    OP_REQUIRES_OK(ctx, ToTf(engine.BeginLanding(replica, always_, &step)));
    if (step == nullptr) return;
    const absl::Status status =
        Finished([&] { return RunUpdate(ctx, engine, *step); });
    engine.FinishLanding(status.ok());
    OP_REQUIRES_OK(ctx, status);
  }

 private:
  bool always_;
};

REGISTER_KERNEL_BUILDER(Name("LayoutMap>ApplyStep").Device(DEVICE_CPU),
                        ApplyStepOp);
REGISTER_KERNEL_BUILDER(Name("LayoutMap>FollowStep").Device(DEVICE_CPU),
                        FollowStepOp);
REGISTER_KERNEL_BUILDER(Name("LayoutMap>ApplyFollowed").Device(DEVICE_CPU),
                        ApplyFollowedOp);
REGISTER_KERNEL_BUILDER(Name("LayoutMap>LandUpdate").Device(DEVICE_CPU),
                        LandUpdateOp);

}  // namespace
}  // namespace layoutmap
