// The way of a batch through the host engine: in, and out as activations.

#include <memory>
#include <vector>

#include "cc/kernels/engine_resource.h"
#include "cc/kernels/locked_shards.h"

namespace layoutmap {
namespace {

using tensorflow::DEVICE_CPU;
using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// An op with the ids of a batch.
class BatchOp : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  template <typename Tid>
  static absl::Status ReadFeatures(OpKernelContext* ctx,
                                   std::vector<FeatureInput<Tid>>* features) {
    const Tensor* num_samples;
    OpInputList ids, splits, weights;
    TF_RETURN_IF_ERROR(ctx->input("num_samples", &num_samples));
    TF_RETURN_IF_ERROR(ctx->input_list("ids", &ids));
    TF_RETURN_IF_ERROR(ctx->input_list("splits", &splits));
    TF_RETURN_IF_ERROR(ctx->input_list("weights", &weights));
    if (num_samples->shape() != TensorShape({ids.size()})) {
      return absl::InvalidArgumentError(absl::StrCat(
          "`num_samples` must be one per feature, [", ids.size(),
          "]. Received: shape ", num_samples->shape().DebugString()));
    }
    features->resize(ids.size());
    for (int f = 0; f < ids.size(); ++f) {
      TF_RETURN_IF_ERROR(CheckRank("ids", ids[f], 1));
      TF_RETURN_IF_ERROR(CheckRank("weights", weights[f], 1));
      TF_RETURN_IF_ERROR(CheckSplits(splits[f]));
      FeatureInput<Tid>& feature = (*features)[f];
      feature.ids = View<Tid>(ids[f]);
      feature.splits = View<int64_t>(splits[f]);
      feature.form = FormOf(splits[f]);
      feature.num_samples = num_samples->vec<int64_t>()(f);
      feature.weights = View<float>(weights[f]);
    }
    return absl::OkStatus();
  }

 private:
  static absl::Status CheckSplits(const Tensor& splits) {
    if (splits.dims() == 1) return absl::OkStatus();
    if (splits.dims() == 2 && splits.dim_size(1) == 2) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "`splits` must be row_splits of rank 1, or indices [num_ids, 2]. "
        "Received: shape ",
        splits.shape().DebugString()));
  }

  static Form FormOf(const Tensor& splits) {
    if (splits.dims() == 2) return Form::kSparse;
    return splits.NumElements() == 0 ? Form::kDense : Form::kRagged;
  }
};

template <typename Tid>
class EnqueueStepOp : public BatchOp {
 public:
  using BatchOp::BatchOp;

  void Run(OpKernelContext* ctx) override {
    EnginePtr engine;
    int32_t replica;
    const Tensor* training;
    std::vector<FeatureInput<Tid>> features;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &engine));
    OP_REQUIRES_OK(ctx, GetReplica(ctx, &replica));
    OP_REQUIRES_OK(ctx, ctx->input("training", &training));
    OP_REQUIRES_OK(ctx, CheckRank("training", *training, 0));
    OP_REQUIRES_OK(ctx, ReadFeatures(ctx, &features));
    OP_REQUIRES_OK(
        ctx, ToTf(engine->engine().Enqueue(replica, training->scalar<bool>()(),
                                           features, TfParallelFor(ctx))));
  }
};

template <typename Tid>
class OpenStepOp : public BatchOp {
 public:
  using BatchOp::BatchOp;

  void Run(OpKernelContext* ctx) override {
    EnginePtr engine;
    int32_t replica;
    std::vector<FeatureInput<Tid>> features;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &engine));
    OP_REQUIRES_OK(ctx, GetReplica(ctx, &replica));
    OP_REQUIRES_OK(ctx, ReadFeatures(ctx, &features));
    std::shared_ptr<const Batch> batch;
    Tensor* token = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &token));
    OP_REQUIRES_OK(ctx, ToTf(engine->engine().MakeBatch(features, &batch)));
    OP_REQUIRES_OK(ctx, ToTf(engine->tokens().Open(
                            replica, batch, &token->scalar<int64_t>()())));
  }
};

// An op that looks a batch up.
class ActivationsOp : public Kernel {
 public:
  explicit ActivationsOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dims", &dims_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("max_sequence_lengths", &lengths_));
  }

 protected:
  // What the graph was told of the activations must be what comes.
  absl::Status CheckStaticShapes(const EngineConfig& config) const {
    const size_t count = config.features.size();
    bool same = dims_.size() == count && lengths_.size() == count;
    for (size_t f = 0; same && f < count; ++f) {
      same = dims_[f] == config.dim_of_feature(f) &&
             lengths_[f] == config.features[f].max_sequence_length;
    }
    if (same) return absl::OkStatus();
    return absl::InvalidArgumentError(
        "`dims` and `max_sequence_lengths` must be those that the engine was "
        "created with, one per feature");
  }

  static absl::Status LookUp(OpKernelContext* ctx, const EngineConfig& config,
                             const Batch& batch) {
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
        TF_RETURN_IF_ERROR(shards.HalfView(first, table.name, table.partition,
                                           table.row_type, {table.dim},
                                           &half_tables[t]));
      }
      first += table.partition.num_shards();
    }
    TF_RETURN_IF_ERROR(CheckAllUsed("shards", first, shards.size()));
    OpOutputList activations;
    TF_RETURN_IF_ERROR(ctx->output_list("activations", &activations));
    if (activations.size() != static_cast<int>(batch.size())) {
      return absl::InvalidArgumentError(
          absl::StrCat("This engine has ", batch.size(),
                       " features. Received: ", activations.size(), " dims"));
    }
    for (size_t f = 0; f < batch.size(); ++f) {
      const RaggedIds& ids = batch[f];
      const int32_t t = config.table_of_feature[f];
      const TableSpec& table = config.tables[t];
      TensorShape shape({ids.num_samples()});
      const int64_t length = config.features[f].max_sequence_length;
      if (length > 0) TF_RETURN_IF_ERROR(shape.AddDimWithStatus(length));
      TF_RETURN_IF_ERROR(shape.AddDimWithStatus(table.dim));
      Tensor* out = nullptr;
      TF_RETURN_IF_ERROR(
          activations.allocate(static_cast<int>(f), shape, &out));
      const MatrixView<float> view = {out->flat<float>().data(),
                                      ids.num_outputs(), table.dim};
      const RowKernels& kernels = RowKernelsFor(CurrentCpuLevel());
      if (table.row_type == RowType::kFloat32) {
        Lookup(tables[t], ids.rows(), ids.splits(), ids.gains(), kernels,
               TfParallelFor(ctx), view, table.Quantized());
      } else {
        Lookup(half_tables[t], table.row_type, ids.rows(), ids.splits(),
               ids.gains(), kernels, TfParallelFor(ctx), view,
               table.Quantized());
      }
    }
    return absl::OkStatus();
  }

 private:
  std::vector<int64_t> dims_;
  std::vector<int64_t> lengths_;
};

class DequeueStepOp : public ActivationsOp {
 public:
  using ActivationsOp::ActivationsOp;

  void Run(OpKernelContext* ctx) override {
    EnginePtr engine;
    int32_t replica;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &engine));
    OP_REQUIRES_OK(ctx, GetReplica(ctx, &replica));
    std::shared_ptr<const Batch> batch;
    OP_REQUIRES_OK(ctx, CheckStaticShapes(engine->engine().config()));
    OP_REQUIRES_OK(ctx, ToTf(engine->engine().BeginDequeue(replica, &batch)));
    const absl::Status status = Finished(
        [&] { return LookUp(ctx, engine->engine().config(), *batch); });
    engine->engine().FinishDequeue(replica, status.ok());
    OP_REQUIRES_OK(ctx, status);
  }
};

class LookUpStepOp : public ActivationsOp {
 public:
  using ActivationsOp::ActivationsOp;

  void Run(OpKernelContext* ctx) override {
    EnginePtr engine;
    int32_t replica;
    const Tensor* token;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &engine));
    OP_REQUIRES_OK(ctx, GetReplica(ctx, &replica));
    OP_REQUIRES_OK(ctx, ctx->input("token", &token));
    OP_REQUIRES_OK(ctx, CheckRank("token", *token, 0));
    std::shared_ptr<const Batch> batch;
    OP_REQUIRES_OK(ctx, CheckStaticShapes(engine->engine().config()));
    OP_REQUIRES_OK(ctx, ToTf(engine->tokens().Find(
                            replica, token->scalar<int64_t>()(), &batch)));
    OP_REQUIRES_OK(ctx, LookUp(ctx, engine->engine().config(), *batch));
  }
};

REGISTER_KERNEL_BUILDER(Name("LayoutMap>EnqueueStep")
                            .Device(DEVICE_CPU)
                            .TypeConstraint<int32_t>("Tids"),
                        EnqueueStepOp<int32_t>);
REGISTER_KERNEL_BUILDER(Name("LayoutMap>EnqueueStep")
                            .Device(DEVICE_CPU)
                            .TypeConstraint<int64_t>("Tids"),
                        EnqueueStepOp<int64_t>);
REGISTER_KERNEL_BUILDER(Name("LayoutMap>OpenStep")
                            .Device(DEVICE_CPU)
                            .TypeConstraint<int32_t>("Tids"),
                        OpenStepOp<int32_t>);
REGISTER_KERNEL_BUILDER(Name("LayoutMap>OpenStep")
                            .Device(DEVICE_CPU)
                            .TypeConstraint<int64_t>("Tids"),
                        OpenStepOp<int64_t>);
REGISTER_KERNEL_BUILDER(Name("LayoutMap>LookUpStep").Device(DEVICE_CPU),
                        LookUpStepOp);
REGISTER_KERNEL_BUILDER(Name("LayoutMap>DequeueStep").Device(DEVICE_CPU),
                        DequeueStepOp);

}  // namespace
}  // namespace layoutmap
