// Kernels that enqueue batches in the host engine and look up their
// activations.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"
#include "cc/core/tables/lookup.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/kernels/engine/batch_inputs.h"
#include "cc/kernels/engine/engine_resource.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace layoutmap {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;

template <typename Tid>
class EnqueueStepOp : public EngineOp {
 public:
  explicit EnqueueStepOp(OpKernelConstruction* ctx) : EngineOp(ctx) {
    OP_REQUIRES_OK(ctx, inputs_.Read(ctx));
  }

  absl::Status RunOn(OpKernelContext* ctx, EngineResource& engine,
                     int32_t replica) override {
    bool training;
    TF_RETURN_IF_ERROR(GetScalar(ctx, "training", &training));
    std::shared_ptr<const Batch> batch;
    Status made;
    TF_RETURN_IF_ERROR(
        inputs_.MakeBatch<Tid>(ctx, engine.engine(), &batch, &made, !training));
    return ToTf(engine.engine().EnqueueBatch(
        replica, training, made, std::move(batch), TfParallelFor(ctx)));
  }

 private:
  BatchInputs inputs_;
};

template <typename Tid>
class OpenStepOp : public EngineOp {
 public:
  explicit OpenStepOp(OpKernelConstruction* ctx) : EngineOp(ctx) {
    OP_REQUIRES_OK(ctx, inputs_.Read(ctx));
  }

  absl::Status RunOn(OpKernelContext* ctx, EngineResource& engine,
                     int32_t replica) override {
    std::shared_ptr<const Batch> batch;
    int64_t token;
    Status made;
    TF_RETURN_IF_ERROR(
        inputs_.MakeBatch<Tid>(ctx, engine.engine(), &batch, &made));
    TF_RETURN_IF_ERROR(ToTf(made));
    TF_RETURN_IF_ERROR(
        SetVocabularySteps(ctx, engine.engine().config(), batch));
    TF_RETURN_IF_ERROR(ToTf(engine.tokens().Open(replica, batch, &token)));
    return SetScalar(ctx, "token", token);
  }

 private:
  // Sets the vocabulary step of each feature whose rows belong to keys.
  static absl::Status SetVocabularySteps(
      OpKernelContext* ctx, const EngineConfig& config,
      const std::shared_ptr<const Batch>& batch) {
    const Tensor* input;
    TF_RETURN_IF_ERROR(GetInput(ctx, "vocabulary_steps", 1, &input));
    const Span<const int64_t> steps = View<int64_t>(*input);
    if (steps.empty()) return absl::OkStatus();
    TF_RETURN_IF_ERROR(CheckListSize("tables", "vocabulary steps",
                                     config.tables.size(),
                                     static_cast<int>(steps.size())));
    for (const int64_t step : steps) {
      if (step >= 0 && step <= INT32_MAX) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "`vocabulary_steps` must be in [0, 2^31). Received: ", step));
    }
    // `MakeBatch` has created the batch, and no other object refers to it yet.
    Batch& own = *std::const_pointer_cast<Batch>(batch);
    for (size_t f = 0; f < own.size(); ++f) {
      // The ids are rows already, so no row is replaced.
      own[f].TakeRowsOfKeys(
          {}, 0, static_cast<int32_t>(steps[config.table_of_feature[f]]));
    }
    return absl::OkStatus();
  }

  BatchInputs inputs_;
};

// Base class of ops that look up a batch.
class ActivationsOp : public EngineOp {
 public:
  explicit ActivationsOp(OpKernelConstruction* ctx) : EngineOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dims", &dims_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("max_sequence_lengths", &lengths_));
  }

 protected:
  // Returns an error if the static shapes of the graph do not match the
  // configuration of the engine.
  absl::Status CheckStaticShapes(const EngineConfig& config) const {
    const size_t count = config.features.size();
    bool same = dims_.size() == count && lengths_.size() == count;
    for (size_t f = 0; same && f < count; ++f) {
      same = dims_[f] == config.dim_of_feature(f) &&
             lengths_[f] == config.features[f].max_sequence_length;
    }
    if (same) return absl::OkStatus();
    return absl::InvalidArgumentError(
        "`dims` and `max_sequence_lengths` must have the values that the "
        "engine was created with, one per feature");
  }

  // Looks up a batch, and returns the result as outputs of the op.
  static absl::Status LookUpOutputs(OpKernelContext* ctx,
                                    EngineResource& resource,
                                    const Batch& batch) {
    std::vector<Tensor> activations;
    TF_RETURN_IF_ERROR(LookUp(ctx, resource, batch, &activations));
    return SetOutputs(ctx, activations);
  }

  static absl::Status SetOutputs(OpKernelContext* ctx,
                                 const std::vector<Tensor>& activations) {
    OpOutputList outputs;
    TF_RETURN_IF_ERROR(ctx->output_list("activations", &outputs));
    TF_RETURN_IF_ERROR(
        CheckListSize("features", "dims", activations.size(), outputs.size()));
    for (size_t f = 0; f < activations.size(); ++f) {
      outputs.set(static_cast<int>(f), activations[f]);
    }
    return absl::OkStatus();
  }

  static absl::Status LookUp(OpKernelContext* ctx, EngineResource& resource,
                             const Batch& batch,
                             std::vector<Tensor>* activations) {
    const EngineConfig& config = resource.engine().config();
    LockedShards shards;
    TF_RETURN_IF_ERROR(
        shards.Lock(ctx, {"shards"}, LockedShards::Mode::kShared));
    std::vector<ShardedView<const float>> tables(config.tables.size());
    std::vector<ShardedView<const uint16_t>> half_tables(tables.size());
    int first = 0;
    for (size_t t = 0; t < tables.size(); ++t) {
      const TableSpec& table = config.tables[t];
      if (table.row_type == RowType::kFloat32) {
        TF_RETURN_IF_ERROR(shards.View(first, table.name, table.partition,
                                       {table.dim}, &tables[t]));
      } else {
        TF_RETURN_IF_ERROR(shards.View(first, table.name, table.partition,
                                       {table.dim}, &half_tables[t],
                                       HalfDtype(table)));
      }
      first += table.partition.num_shards();
    }
    TF_RETURN_IF_ERROR(CheckNumVariables("This engine's tables need", "shards",
                                         first, shards.size()));
    resource.memory().See(shards.Memory());
    TF_RETURN_IF_ERROR(Allocate(ctx, resource, batch, activations));
    std::vector<LookupTask> tasks(batch.size());
    for (size_t f = 0; f < batch.size(); ++f) {
      const RaggedIds& ids = batch[f];
      const int32_t t = config.table_of_feature[f];
      LookupTask& task = tasks[f];
      task.row_type = config.tables[t].row_type;
      if (task.row_type == RowType::kFloat32) {
        task.table = &tables[t];
      } else {
        task.half_table = &half_tables[t];
      }
      task.rows = ids.lookup_rows();
      task.splits = ids.splits();
      task.even = ids.even();
      task.gains = ids.gains();
      task.output_gains = ids.output_gains();
      task.out = {(*activations)[f].flat<float>().data(), ids.num_outputs(),
                  config.tables[t].dim};
      task.quantization = config.tables[t].Quantized();
    }
    LookupAll(tasks, RowKernelsFor(CurrentCpuLevel()), TfParallelFor(ctx));
    return absl::OkStatus();
  }

 private:
  // Allocates the activations of all features as slices of one buffer.
  static absl::Status Allocate(OpKernelContext* ctx, EngineResource& resource,
                               const Batch& batch,
                               std::vector<Tensor>* activations) {
    constexpr int64_t kAlignment = ActivationBuffers::kAlignment;
    const EngineConfig& config = resource.engine().config();
    std::vector<int64_t> starts = {0};
    std::vector<TensorShape> shapes;
    for (size_t f = 0; f < batch.size(); ++f) {
      TensorShape shape({batch[f].num_samples()});
      const int64_t length = config.features[f].max_sequence_length;
      if (length > 0) TF_RETURN_IF_ERROR(shape.AddDimWithStatus(length));
      TF_RETURN_IF_ERROR(shape.AddDimWithStatus(config.dim_of_feature(f)));
      const int64_t lines = shape.num_elements() / kAlignment +
                            (shape.num_elements() % kAlignment != 0);
      if (lines > (INT64_MAX - starts.back()) / kAlignment) {
        return absl::ResourceExhaustedError(
            absl::StrCat("The activations of this step do not fit in memory. "
                         "Received: feature '",
                         config.features[f].feature,
                         "' with activations of shape ", shape.DebugString()));
      }
      starts.push_back(starts.back() + lines * kAlignment);
      shapes.push_back(shape);
    }
    Tensor buffer;
    TF_RETURN_IF_ERROR(resource.buffers().Take(ctx, starts.back(), &buffer));
    for (size_t f = 0; f < batch.size(); ++f) {
      Tensor activation(tensorflow::DT_FLOAT, TensorShape({0}));
      if (shapes[f].num_elements() > 0) {
        activation =
            buffer.Slice(starts[f], starts[f] + shapes[f].num_elements());
      }
      Tensor& shaped = activations->emplace_back();
      if (!shaped.CopyFrom(activation, shapes[f])) {
        return absl::InternalError("A slice of activations has a wrong size");
      }
    }
    return absl::OkStatus();
  }

  std::vector<int64_t> dims_;
  std::vector<int64_t> lengths_;
};

class DequeueStepOp : public ActivationsOp {
 public:
  using ActivationsOp::ActivationsOp;

  absl::Status RunOn(OpKernelContext* ctx, EngineResource& resource,
                     int32_t replica) override {
    HostEngine& engine = resource.engine();
    std::shared_ptr<const Batch> batch;
    TF_RETURN_IF_ERROR(CheckStaticShapes(engine.config()));
    TF_RETURN_IF_ERROR(ToTf(engine.BeginDequeue(replica, &batch)));
    return RunAndFinish(
        [&] {
          const std::vector<Tensor> next = resource.TakeNext(replica, batch);
          return next.empty() ? LookUpOutputs(ctx, resource, *batch)
                              : SetOutputs(ctx, next);
        },
        [&](bool looked_up) { engine.FinishDequeue(replica, looked_up); });
  }
};

class PrefetchStepOp : public ActivationsOp {
 public:
  using ActivationsOp::ActivationsOp;

  absl::Status RunOn(OpKernelContext* ctx, EngineResource& resource,
                     int32_t replica) override {
    EngineResource::Next next;
    TF_RETURN_IF_ERROR(CheckStaticShapes(resource.engine().config()));
    TF_RETURN_IF_ERROR(ToTf(
        resource.engine().FindNext(replica, &next.batch, &next.num_updates)));
    if (next.batch == nullptr) return absl::OkStatus();
    TF_RETURN_IF_ERROR(LookUp(ctx, resource, *next.batch, &next.activations));
    resource.KeepNext(replica, std::move(next));
    return absl::OkStatus();
  }
};

class LookUpStepOp : public ActivationsOp {
 public:
  using ActivationsOp::ActivationsOp;

  absl::Status RunOn(OpKernelContext* ctx, EngineResource& engine,
                     int32_t replica) override {
    int64_t token;
    std::shared_ptr<const Batch> batch;
    TF_RETURN_IF_ERROR(GetScalar(ctx, "token", &token));
    TF_RETURN_IF_ERROR(CheckStaticShapes(engine.engine().config()));
    TF_RETURN_IF_ERROR(ToTf(engine.tokens().Find(replica, token, &batch)));
    return LookUpOutputs(ctx, engine, *batch);
  }
};

LM_REGISTER_ID_KERNELS("EnqueueStep", EnqueueStepOp);
LM_REGISTER_ID_KERNELS("OpenStep", OpenStepOp);
LM_REGISTER_KERNEL("DequeueStep", DequeueStepOp);
LM_REGISTER_KERNEL("LookUpStep", LookUpStepOp);
LM_REGISTER_KERNEL("PrefetchStep", PrefetchStepOp);

}  // namespace
}  // namespace layoutmap
