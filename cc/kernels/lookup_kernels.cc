// Kernels for the pooled gather and for the fused update. They access the
// variables directly and do not use a host engine.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/check_ids.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/optimizers/apply.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/tables/lookup.h"
#include "cc/core/tables/sharded_view.h"
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

// Returns the start of an error message about a wrong number of variables.
std::string Needs(const std::string& table) {
  return "Table '" + table + "' needs";
}

template <typename Tid>
class LookupRowsOp : public Kernel {
 public:
  explicit LookupRowsOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, GetPlacement(ctx, &placement_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dim", &dim_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("feature", &spec_.feature));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table", &spec_.table));
  }

  void Run(OpKernelContext* ctx) override {
    RowPartition partition;
    OP_REQUIRES_OK(ctx, GetPartition(ctx, placement_, &partition));
    RaggedIds ids;
    Span<const float> gains;
    OP_REQUIRES_OK(ctx, ReadIds(ctx, partition, &ids, &gains));

    LockedShards shards;
    OP_REQUIRES_OK(ctx,
                   shards.Lock(ctx, {"shards"}, LockedShards::Mode::kShared));
    ShardedView<const float> table;
    OP_REQUIRES_OK(ctx, shards.View(0, spec_.table, partition, {dim_}, &table));
    OP_REQUIRES_OK(ctx,
                   CheckNumVariables(Needs(spec_.table), "shards",
                                     partition.num_shards(), shards.size()));
    TensorShape shape({ids.num_outputs()});
    OP_REQUIRES_OK(ctx, shape.AddDimWithStatus(dim_));
    Tensor* activations = nullptr;
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output("activations", shape, &activations));
    Lookup(table, ids.rows(), ids.splits(), gains,
           RowKernelsFor(CurrentCpuLevel()), TfParallelFor(ctx),
           {activations->flat<float>().data(), ids.num_outputs(), dim_});
  }

 private:
  // Reads and checks the ids and the splits. The input already contains the
  // computed gains.
  absl::Status ReadIds(OpKernelContext* ctx, const RowPartition& partition,
                       RaggedIds* checked, Span<const float>* gains) const {
    const Tensor* ids;
    const Tensor* row_splits;
    const Tensor* factors;
    TF_RETURN_IF_ERROR(GetInput(ctx, "ids", 1, &ids));
    TF_RETURN_IF_ERROR(GetInput(ctx, "row_splits", 1, &row_splits));
    TF_RETURN_IF_ERROR(ctx->input("gains", &factors));
    if (factors->shape() != ids->shape()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "Feature '", spec_.feature,
          "': `gains` must have one value per id. Received: shape ",
          factors->shape().DebugString(), ", with ids of shape ",
          ids->shape().DebugString()));
    }
    *gains = View<float>(*factors);
    FeatureSpec spec = spec_;
    spec.num_rows = partition.num_rows();
    FeatureInput<Tid> input;
    input.ids = View<Tid>(*ids);
    input.splits = View<int64_t>(*row_splits);
    input.num_samples = input.splits.size() - 1;
    return ToTf(RaggedIds::Make(spec, input, checked));
  }

  FeatureSpec spec_;
  Placement placement_;
  int64_t dim_;
};

// Checks inputs that are usually the outputs of `FindUniqueRows`. The check is
// necessary because a graph can pass other tensors.
template <typename Tid>
Status CheckUniqueRows(int64_t num_rows, Span<const Tid> rows,
                       Span<const int64_t> splits,
                       Span<const int32_t> positions) {
  bool ok = splits.size() == rows.size() + 1 && splits[0] == 0 &&
            splits[rows.size()] == positions.size();
  for (int64_t u = 0; ok && u < rows.size(); ++u) {
    ok = splits[u] <= splits[u + 1] && !IsOutside(rows[u], num_rows) &&
         (u == 0 || rows[u - 1] < rows[u]);
  }
  for (int32_t position : positions) {
    ok = ok && !IsOutside(position, positions.size());
  }
  return ok ? Status()
            : InvalidArgument(
                  "`unique_rows`, `unique_splits` and `positions` must be the "
                  "outputs of FindUniqueRows for a table with " +
                  std::to_string(num_rows) + " rows");
}

template <typename Tid>
class ApplyRowGradientsOp : public Kernel {
 public:
  explicit ApplyRowGradientsOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, GetOptimizer(ctx, &optimizer_));
    OP_REQUIRES_OK(ctx, GetPlacement(ctx, &placement_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table", &table_));
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor* unique_rows;
    const Tensor* unique_splits;
    const Tensor* unique_positions;
    const Tensor* row_splits;
    const Tensor* gains;
    const Tensor* gradients;
    const Tensor* hyperparameters;
    RowPartition partition;
    OP_REQUIRES_OK(ctx, GetPartition(ctx, placement_, &partition));
    OP_REQUIRES_OK(ctx, GetInput(ctx, "unique_rows", 1, &unique_rows));
    OP_REQUIRES_OK(ctx, GetInput(ctx, "unique_splits", 1, &unique_splits));
    OP_REQUIRES_OK(ctx, GetInput(ctx, "positions", 1, &unique_positions));
    OP_REQUIRES_OK(ctx, GetInput(ctx, "row_splits", 1, &row_splits));
    OP_REQUIRES_OK(ctx, GetInput(ctx, "gains", 1, &gains));
    OP_REQUIRES_OK(ctx, GetInput(ctx, "gradients", 2, &gradients));
    OP_REQUIRES_OK(ctx, GetInput(ctx, "hyperparameters", 1, &hyperparameters));
    const Span<const Tid> rows = View<Tid>(*unique_rows);
    const Span<const int64_t> splits = View<int64_t>(*unique_splits);
    const Span<const int32_t> positions = View<int32_t>(*unique_positions);
    OP_REQUIRES_OK(ctx, ToTf(CheckUniqueRows<Tid>(partition.num_rows(), rows,
                                                  splits, positions)));
    const int64_t num_samples = gradients->dim_size(0);
    const int64_t dim = gradients->dim_size(1);
    OP_REQUIRES_OK(
        ctx, CheckSplits(*row_splits, *gains, num_samples, positions.size()));
    OP_REQUIRES_OK(ctx,
                   ToTf(CheckHyperparameters(optimizer_, table_,
                                             View<float>(*hyperparameters))));

    OpInputList shard_handles, slot_handles;
    OP_REQUIRES_OK(ctx, ctx->input_list("shards", &shard_handles));
    OP_REQUIRES_OK(ctx, ctx->input_list("slots", &slot_handles));
    const int64_t num_shards = partition.num_shards();
    OP_REQUIRES_OK(ctx, CheckNumVariables(Needs(table_), "shards", num_shards,
                                          shard_handles.size()));
    OP_REQUIRES_OK(ctx, CheckNumVariables(Needs(table_), "slots",
                                          NumSlots(optimizer_) * num_shards,
                                          slot_handles.size()));
    LockedShards shards;
    OP_REQUIRES_OK(ctx, shards.Lock(ctx, {"shards", "slots"},
                                    LockedShards::Mode::kExclusive));
    std::vector<ShardedView<float>> views(1 + NumSlots(optimizer_));
    for (size_t j = 0; j < views.size(); ++j) {
      // Element 0 is the table. The slot variables follow.
      const int slot = static_cast<int>(j) - 1;
      const int64_t columns = j == 0 ? dim : SlotDim(optimizer_, slot, dim);
      OP_REQUIRES_OK(ctx, shards.MutableView(ctx, j * num_shards, table_,
                                             partition, {columns}, &views[j]));
    }

    // The loop computes the gradient row and the gain of each position, in
    // summation order.
    const Span<const int64_t> sample_splits = View<int64_t>(*row_splits);
    std::vector<uint32_t> sample_of(positions.size());
    for (int64_t s = 0; s < num_samples; ++s) {
      std::fill(sample_of.begin() + sample_splits[s],
                sample_of.begin() + sample_splits[s + 1], s);
    }
    const Span<const float> all_gains = View<float>(*gains);
    std::vector<uint32_t> gradient_of(positions.size());
    std::vector<float> gain_of(positions.size());
    for (int64_t k = 0; k < positions.size(); ++k) {
      gradient_of[k] = sample_of[positions[k]];
      gain_of[k] = all_gains[positions[k]];
    }
    std::vector<const float*> gradient_rows(num_samples);
    for (int64_t s = 0; s < num_samples; ++s) {
      gradient_rows[s] = gradients->flat<float>().data() + s * dim;
    }
    const std::vector<uint32_t> row_values(rows.begin(), rows.end());
    RowGradients row_gradients;
    row_gradients.rows = row_values;
    row_gradients.splits = splits;
    row_gradients.gradient_of = gradient_of;
    row_gradients.gains = gain_of;
    row_gradients.gradient_rows = gradient_rows;
    ApplyGradients(optimizer_, View<float>(*hyperparameters), row_gradients,
                   views[0],
                   {views.data() + 1, static_cast<int64_t>(views.size()) - 1},
                   RowKernelsFor(CurrentCpuLevel()), TfParallelFor(ctx));
  }

 private:
  absl::Status CheckSplits(const Tensor& row_splits, const Tensor& gains,
                           int64_t num_samples, int64_t num_ids) const {
    const Span<const int64_t> splits = View<int64_t>(row_splits);
    bool ok = gains.NumElements() == num_ids &&
              splits.size() == num_samples + 1 && splits[0] == 0 &&
              splits[num_samples] == num_ids;
    for (int64_t s = 0; ok && s < num_samples; ++s) {
      ok = splits[s] <= splits[s + 1];
    }
    if (ok) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "Table '", table_,
        "': `row_splits` must ascend from 0 to the number of ids, ", num_ids,
        ", with `num_samples` + 1 values, and `gains` must have one value per "
        "id. Received: ",
        splits.size(), " values, ", num_samples, " gradient rows, ",
        gains.NumElements(), " gains"));
  }

  Optimizer optimizer_;
  Placement placement_;
  std::string table_;
};

LM_REGISTER_ID_KERNELS("LookupRows", LookupRowsOp);
LM_REGISTER_ID_KERNELS("ApplyRowGradients", ApplyRowGradientsOp);

}  // namespace
}  // namespace layoutmap
