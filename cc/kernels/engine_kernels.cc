// The host engine behind a resource handle.

#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/host_engine.h"
#include "cc/core/quantization.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace layoutmap {
namespace {

using tensorflow::DEVICE_CPU;
using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::ResourceHandle;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class EngineResource : public tensorflow::ResourceBase {
 public:
  explicit EngineResource(std::unique_ptr<HostEngine> engine)
      : engine_(std::move(engine)) {}

  HostEngine& engine() { return *engine_; }

  std::string DebugString() const override {
    return absl::StrCat("HostEngine with ", engine_->config().tables.size(),
                        " tables");
  }

 private:
  std::unique_ptr<HostEngine> engine_;
};

using EnginePtr = tensorflow::core::RefCountPtr<EngineResource>;

absl::Status GetEngine(OpKernelContext* ctx, EnginePtr* engine) {
  TF_RETURN_IF_ERROR(CheckRank("engine", ctx->input(0), 0));
  return tensorflow::LookupResource(ctx, tensorflow::HandleFromInput(ctx, 0),
                                    engine);
}

absl::Status CheckAllUsed(const char* input, int needed, int received) {
  if (needed == received) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("This engine's tables need ",
                                                 needed, " `", input,
                                                 "`. Received: ", received));
}

absl::Status GetReplica(OpKernelContext* ctx, int32_t* replica) {
  TF_RETURN_IF_ERROR(CheckRank("replica", ctx->input(1), 0));
  *replica = ctx->input(1).scalar<int32_t>()();
  return absl::OkStatus();
}

// Runs the update of `step` on the variables of the op's inputs `shards` and
// `slots`.
absl::Status RunUpdate(OpKernelContext* ctx, const HostEngine& engine,
                       const HostEngine::Step& step) {
  const std::vector<TableSpec>& specs = engine.config().tables;
  OpInputList shard_handles, slot_handles;
  TF_RETURN_IF_ERROR(ctx->input_list("shards", &shard_handles));
  TF_RETURN_IF_ERROR(ctx->input_list("slots", &slot_handles));
  int num_shards = 0, num_slot_shards = 0;
  for (const TableSpec& table : specs) {
    num_shards += table.partition.num_shards();
    num_slot_shards += NumSlots(table.optimizer) * table.partition.num_shards();
  }
  TF_RETURN_IF_ERROR(CheckAllUsed("shards", num_shards, shard_handles.size()));
  TF_RETURN_IF_ERROR(
      CheckAllUsed("slots", num_slot_shards, slot_handles.size()));
  LockedShards shards;
  TF_RETURN_IF_ERROR(
      shards.Lock(ctx, {"shards", "slots"}, LockedShards::Mode::kExclusive));
  std::vector<HostEngine::TableViews> tables(specs.size());
  int first = 0;
  for (size_t t = 0; t < specs.size(); ++t) {
    TF_RETURN_IF_ERROR(shards.MutableView(ctx, first, specs[t].name,
                                          specs[t].partition, {specs[t].dim},
                                          &tables[t].table));
    first += specs[t].partition.num_shards();
    tables[t].hyperparameters = step.hyperparameters[t];
  }
  for (size_t t = 0; t < specs.size(); ++t) {
    tables[t].slots.resize(NumSlots(specs[t].optimizer));
    for (ShardedView<float>& slot : tables[t].slots) {
      TF_RETURN_IF_ERROR(
          shards.MutableView(ctx, first, specs[t].name + " (slot variable)",
                             specs[t].partition, {specs[t].dim}, &slot));
      first += specs[t].partition.num_shards();
    }
  }
  return ToTf(engine.Update(step, tables, RowKernelsFor(CurrentCpuLevel()),
                            TfParallelFor(ctx)));
}

// What `run` returns; an error also where it throws for lack of memory, so that
// the engine always hears the end of what it began.
template <typename Run>
absl::Status Finished(const Run& run) {
  try {
    return run();
  } catch (const std::exception& error) {
    return absl::ResourceExhaustedError(
        absl::StrCat("Not enough memory: ", error.what()));
  }
}

class CreateHostEngineOp : public Kernel {
 public:
  explicit CreateHostEngineOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadTables(ctx));
    OP_REQUIRES_OK(ctx, ReadFeatures(ctx));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_replicas", &config_.num_replicas));
    OP_REQUIRES_OK(
        ctx, ctx->GetAttr("max_pending_steps", &config_.max_pending_steps));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("pipelined", &config_.is_pipelined));
    OP_REQUIRES_OK(ctx, ReadQuantization(ctx));
  }

  void Run(OpKernelContext* ctx) override {
    std::unique_ptr<HostEngine> engine;
    OP_REQUIRES_OK(ctx, ToTf(HostEngine::Make(config_, &engine)));
    Tensor* handle = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &handle));
    handle->scalar<ResourceHandle>()() = ResourceHandle::MakeRefCountingHandle(
        new EngineResource(std::move(engine)), ctx->device()->name());
  }

 private:
  absl::Status ReadTables(OpKernelConstruction* ctx) {
    std::vector<std::string> names, placements, optimizers;
    std::vector<int64_t> num_rows, dims, num_shards, offsets;
    TF_RETURN_IF_ERROR(ctx->GetAttr("table_names", &names));
    TF_RETURN_IF_ERROR(ctx->GetAttr("table_num_rows", &num_rows));
    TF_RETURN_IF_ERROR(ctx->GetAttr("table_dims", &dims));
    TF_RETURN_IF_ERROR(ctx->GetAttr("table_num_shards", &num_shards));
    TF_RETURN_IF_ERROR(ctx->GetAttr("table_placements", &placements));
    TF_RETURN_IF_ERROR(ctx->GetAttr("table_offsets", &offsets));
    TF_RETURN_IF_ERROR(ctx->GetAttr("table_optimizers", &optimizers));
    int64_t next = 0;
    for (size_t t = 0; t < names.size(); ++t) {
      if (t >= num_rows.size() || t >= dims.size() || t >= num_shards.size() ||
          t >= placements.size() || t >= optimizers.size() ||
          num_shards[t] < 1 ||
          num_shards[t] >= static_cast<int64_t>(offsets.size()) - next) {
        return absl::InvalidArgumentError(absl::StrCat(
            "Table '", names[t], "': an attr `table_*` has too few values"));
      }
      TableSpec table;
      table.name = names[t];
      table.dim = dims[t];
      Placement placement;
      TF_RETURN_IF_ERROR(ToTf(ParsePlacement(placements[t], &placement)));
      TF_RETURN_IF_ERROR(ToTf(ParseOptimizer(optimizers[t], &table.optimizer)));
      TF_RETURN_IF_ERROR(ToTf(RowPartition::Make(
          placement, Span<const int64_t>(&offsets[next], num_shards[t] + 1),
          &table.partition)));
      next += num_shards[t] + 1;
      if (table.partition.num_rows() != num_rows[t]) {
        return absl::InvalidArgumentError(absl::StrCat(
            "Table '", names[t], "': its offsets must end with its ",
            num_rows[t], " rows. Received: ", table.partition.num_rows()));
      }
      config_.tables.push_back(std::move(table));
    }
    const size_t count = names.size();
    if (num_rows.size() != count || dims.size() != count ||
        num_shards.size() != count || placements.size() != count ||
        optimizers.size() != count ||
        next != static_cast<int64_t>(offsets.size())) {
      return absl::InvalidArgumentError(absl::StrCat(
          "An attr `table_*` has too many values for ", count, " tables"));
    }
    return absl::OkStatus();
  }

  absl::Status ReadQuantization(OpKernelConstruction* ctx) {
    std::vector<int64_t> num_buckets;
    std::vector<float> limits;
    TF_RETURN_IF_ERROR(ctx->GetAttr("table_num_buckets", &num_buckets));
    TF_RETURN_IF_ERROR(ctx->GetAttr("table_limits", &limits));
    const size_t count = config_.tables.size();
    if (num_buckets.empty() && limits.empty()) return absl::OkStatus();
    if (num_buckets.size() != count || limits.size() != 2 * count) {
      return absl::InvalidArgumentError(absl::StrCat(
          "`table_num_buckets` must have one value and `table_limits` two for "
          "each of the ",
          count, " tables, or both none. Received: ", num_buckets.size(),
          " and ", limits.size()));
    }
    for (size_t t = 0; t < count; ++t) {
      TableSpec& table = config_.tables[t];
      if (num_buckets[t] == 0) continue;
      table.is_quantized = true;
      TF_RETURN_IF_ERROR(ToTf(MakeQuantization(limits[2 * t], limits[2 * t + 1],
                                               num_buckets[t], table.name,
                                               &table.quantization)));
    }
    return absl::OkStatus();
  }

  absl::Status ReadFeatures(OpKernelConstruction* ctx) {
    std::vector<std::string> names, combiners;
    std::vector<int64_t> lengths;
    TF_RETURN_IF_ERROR(ctx->GetAttr("feature_names", &names));
    TF_RETURN_IF_ERROR(ctx->GetAttr("feature_combiners", &combiners));
    TF_RETURN_IF_ERROR(
        ctx->GetAttr("feature_tables", &config_.table_of_feature));
    TF_RETURN_IF_ERROR(ctx->GetAttr("feature_max_sequence_lengths", &lengths));
    std::string out_of_range;
    TF_RETURN_IF_ERROR(ctx->GetAttr("out_of_range", &out_of_range));
    const std::vector<int32_t>& tables = config_.table_of_feature;
    for (size_t f = 0; f < names.size(); ++f) {
      if (f >= combiners.size() || f >= tables.size() || f >= lengths.size() ||
          tables[f] < 0 ||
          tables[f] >= static_cast<int64_t>(config_.tables.size())) {
        return absl::InvalidArgumentError(absl::StrCat(
            "Feature '", names[f],
            "': an attr `feature_*` has too few values or names no table"));
      }
      const TableSpec& table = config_.tables[tables[f]];
      FeatureSpec feature;
      feature.feature = names[f];
      feature.table = table.name;
      feature.num_rows = table.partition.num_rows();
      feature.max_sequence_length = lengths[f];
      TF_RETURN_IF_ERROR(ToTf(ParseCombiner(combiners[f], &feature.combiner)));
      TF_RETURN_IF_ERROR(
          ToTf(ParseOutOfRange(out_of_range, &feature.out_of_range)));
      config_.features.push_back(std::move(feature));
    }
    const size_t count = names.size();
    if (combiners.size() != count || tables.size() != count ||
        lengths.size() != count) {
      return absl::InvalidArgumentError(absl::StrCat(
          "An attr `feature_*` has too many values for ", count, " features"));
    }
    return absl::OkStatus();
  }

  EngineConfig config_;
};

template <typename Tid>
class EnqueueStepOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    EnginePtr engine;
    int32_t replica;
    const Tensor* training;
    const Tensor* num_samples;
    OpInputList ids, splits, weights;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &engine));
    OP_REQUIRES_OK(ctx, GetReplica(ctx, &replica));
    OP_REQUIRES_OK(ctx, ctx->input("training", &training));
    OP_REQUIRES_OK(ctx, CheckRank("training", *training, 0));
    OP_REQUIRES_OK(ctx, ctx->input("num_samples", &num_samples));
    OP_REQUIRES_OK(ctx, ctx->input_list("ids", &ids));
    OP_REQUIRES_OK(ctx, ctx->input_list("splits", &splits));
    OP_REQUIRES_OK(ctx, ctx->input_list("weights", &weights));
    OP_REQUIRES(
        ctx, num_samples->shape() == TensorShape({ids.size()}),
        absl::InvalidArgumentError(absl::StrCat(
            "`num_samples` must be one per feature, [", ids.size(),
            "]. Received: shape ", num_samples->shape().DebugString())));

    std::vector<FeatureInput<Tid>> features(ids.size());
    for (int f = 0; f < ids.size(); ++f) {
      OP_REQUIRES_OK(ctx, CheckRank("ids", ids[f], 1));
      OP_REQUIRES_OK(ctx, CheckRank("weights", weights[f], 1));
      OP_REQUIRES_OK(ctx, CheckSplits(splits[f]));
      features[f].ids = View<Tid>(ids[f]);
      features[f].splits = View<int64_t>(splits[f]);
      features[f].form = FormOf(splits[f]);
      features[f].num_samples = num_samples->vec<int64_t>()(f);
      features[f].weights = View<float>(weights[f]);
    }
    OP_REQUIRES_OK(
        ctx, ToTf(engine->engine().Enqueue(replica, training->scalar<bool>()(),
                                           features, TfParallelFor(ctx))));
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

class DequeueStepOp : public Kernel {
 public:
  explicit DequeueStepOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dims", &dims_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("max_sequence_lengths", &lengths_));
  }

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

 private:
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
    int first = 0;
    for (size_t t = 0; t < tables.size(); ++t) {
      const TableSpec& table = config.tables[t];
      TF_RETURN_IF_ERROR(shards.View(first, table.name, table.partition,
                                     {table.dim}, &tables[t]));
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
      const ShardedView<const float>& table =
          tables[config.table_of_feature[f]];
      TensorShape shape({ids.num_samples()});
      const int64_t length = config.features[f].max_sequence_length;
      if (length > 0) TF_RETURN_IF_ERROR(shape.AddDimWithStatus(length));
      TF_RETURN_IF_ERROR(shape.AddDimWithStatus(table.dim));
      Tensor* out = nullptr;
      TF_RETURN_IF_ERROR(
          activations.allocate(static_cast<int>(f), shape, &out));
      Lookup(table, ids.rows(), ids.splits(), ids.gains(),
             RowKernelsFor(CurrentCpuLevel()), TfParallelFor(ctx),
             {out->flat<float>().data(), ids.num_outputs(), table.dim},
             config.tables[config.table_of_feature[f]].Quantized());
    }
    return absl::OkStatus();
  }

  std::vector<int64_t> dims_;
  std::vector<int64_t> lengths_;
};

class ApplyStepOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    EnginePtr resource;
    int32_t replica;
    OpInputList gradients;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &resource));
    OP_REQUIRES_OK(ctx, GetReplica(ctx, &replica));
    OP_REQUIRES_OK(ctx, ctx->input_list("gradients", &gradients));
    HostEngine& engine = resource->engine();
    const size_t num_features = engine.config().features.size();
    OP_REQUIRES(ctx, gradients.size() == static_cast<int>(num_features),
                absl::InvalidArgumentError(absl::StrCat(
                    "This engine has ", num_features,
                    " features. Received: ", gradients.size(), " gradients")));

    BatchGradients batch;
    auto tensors = std::make_shared<std::vector<Tensor>>();
    for (int f = 0; f < gradients.size(); ++f) {
      OP_REQUIRES_OK(ctx, CheckGradient(engine.config(), f, gradients[f]));
      tensors->push_back(gradients[f]);
      batch.features.push_back(View<float>(gradients[f]));
    }
    batch.keep_alive = std::move(tensors);
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

  // Of each replica, though those of the last one are used: a wrong value is
  // refused where it comes in.
  static absl::Status ReadHyperparameters(
      OpKernelContext* ctx, const EngineConfig& config,
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
      TF_RETURN_IF_ERROR(ToTf(
          CheckHyperparameters(tables[t].optimizer, tables[t].name,
                               layoutmap::View<float>(hyperparameters[t]))));
      const auto flat = hyperparameters[t].flat<float>();
      values->emplace_back(flat.data(), flat.data() + flat.size());
    }
    return absl::OkStatus();
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

class ResetHostEngineOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    EnginePtr engine;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &engine));
    engine->engine().Reset();
  }
};

class DescribeHostEngineOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    enum {
      kPending,
      kAwaiting,
      kNumUpdates,
      kPoisoned,
      kIsHeld,
      kFeatureCounts,
      kTableCounts
    };
    EnginePtr engine;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &engine));
    const HostEngine::Description d = engine->engine().Describe();
    OP_REQUIRES_OK(ctx, SetOutput(ctx, kPending, d.pending));
    const TensorShape by_replica({static_cast<int64_t>(d.awaiting.size())});
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(kAwaiting, by_replica, &out));
    std::copy(d.awaiting.begin(), d.awaiting.end(), out->flat<bool>().data());
    OP_REQUIRES_OK(ctx, ctx->allocate_output(kNumUpdates, {}, &out));
    out->scalar<int64_t>()() = d.num_updates;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(kPoisoned, {}, &out));
    out->scalar<tensorflow::tstring>()() = d.poisoned;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(kIsHeld, {}, &out));
    out->scalar<bool>()() = d.is_held;
    const auto num_features = static_cast<int64_t>(d.features.size());
    const auto num_tables = static_cast<int64_t>(d.tables.size());
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(kFeatureCounts, {num_features, 5}, &out));
    auto features = out->matrix<int64_t>();
    for (int64_t f = 0; f < num_features; ++f) {
      const HostEngine::FeatureCounts& counts = d.features[f];
      features(f, 0) = counts.num_samples;
      features(f, 1) = counts.ids.num_ids;
      features(f, 2) = counts.ids.num_dropped;
      features(f, 3) = counts.ids.num_clipped;
      features(f, 4) = counts.ids.num_truncated;
    }
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(kTableCounts, {num_tables, 2}, &out));
    auto tables = out->matrix<int64_t>();
    for (int64_t t = 0; t < num_tables; ++t) {
      tables(t, 0) = d.tables[t].num_lookups;
      tables(t, 1) = d.tables[t].num_unique_rows;
    }
  }
};

REGISTER_KERNEL_BUILDER(Name("LayoutMap>CreateHostEngine").Device(DEVICE_CPU),
                        CreateHostEngineOp);
REGISTER_KERNEL_BUILDER(Name("LayoutMap>EnqueueStep")
                            .Device(DEVICE_CPU)
                            .TypeConstraint<int32_t>("Tids"),
                        EnqueueStepOp<int32_t>);
REGISTER_KERNEL_BUILDER(Name("LayoutMap>EnqueueStep")
                            .Device(DEVICE_CPU)
                            .TypeConstraint<int64_t>("Tids"),
                        EnqueueStepOp<int64_t>);
REGISTER_KERNEL_BUILDER(Name("LayoutMap>DequeueStep").Device(DEVICE_CPU),
                        DequeueStepOp);
REGISTER_KERNEL_BUILDER(Name("LayoutMap>ApplyStep").Device(DEVICE_CPU),
                        ApplyStepOp);
REGISTER_KERNEL_BUILDER(Name("LayoutMap>LandUpdate").Device(DEVICE_CPU),
                        LandUpdateOp);
REGISTER_KERNEL_BUILDER(Name("LayoutMap>ResetHostEngine").Device(DEVICE_CPU),
                        ResetHostEngineOp);
REGISTER_KERNEL_BUILDER(Name("LayoutMap>DescribeHostEngine").Device(DEVICE_CPU),
                        DescribeHostEngineOp);

}  // namespace
}  // namespace layoutmap
