// Kernels that assign ids to shards, route ids, find unique rows, and pack
// batches.

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
#include "cc/core/ids/combiner.h"
#include "cc/core/ids/packed_ids.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/rows/route.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/rows/unique_rows.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace layoutmap {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;

template <typename Tid>
class AssignPartitionOp : public Kernel {
 public:
  explicit AssignPartitionOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, GetPlacement(ctx, &placement_));
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor* ids;
    RowPartition partition;
    OP_REQUIRES_OK(ctx, ctx->input("ids", &ids));
    OP_REQUIRES_OK(ctx, GetPartition(ctx, placement_, &partition));
    Tensor* shards = nullptr;
    Tensor* local_rows = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("shards", ids->shape(), &shards));
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output("local_rows", ids->shape(), &local_rows));
    OP_REQUIRES_OK(ctx,
                   ToTf(AssignPartition<Tid>(partition, View<Tid>(*ids),
                                             MutableView<int32_t>(shards),
                                             MutableView<Tid>(local_rows))));
  }

 private:
  Placement placement_;
};

template <typename Tid>
class RouteIdsOp : public Kernel {
 public:
  explicit RouteIdsOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, GetPlacement(ctx, &placement_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("unique", &unique_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table", &table_));
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor* id_values;
    RowPartition partition;
    OP_REQUIRES_OK(ctx, GetInput(ctx, "ids", 1, &id_values));
    OP_REQUIRES_OK(ctx, GetPartition(ctx, placement_, &partition));
    const Span<const Tid> ids = View<Tid>(*id_values);
    if (!unique_) {
      // The sizes of the outputs are known in advance, so the route is written
      // directly to the outputs.
      Tensor *local_rows, *splits, *permutation, *inverse;
      const TensorShape& shape = id_values->shape();
      const TensorShape splits_shape({partition.num_shards() + int64_t{1}});
      OpOutputList inverses;
      OP_REQUIRES_OK(ctx,
                     ctx->allocate_output("local_rows", shape, &local_rows));
      OP_REQUIRES_OK(ctx,
                     ctx->allocate_output("splits", splits_shape, &splits));
      OP_REQUIRES_OK(ctx,
                     ctx->allocate_output("permutation", shape, &permutation));
      // The op computes `inverse` only if the graph uses it, because the
      // computation takes a quarter of the op's time and few graphs use the
      // result.
      OP_REQUIRES_OK(ctx, ctx->output_list("inverse", &inverses));
      OP_REQUIRES_OK(
          ctx,
          inverses.allocate(0, inverses.required(0) ? shape : TensorShape({0}),
                            &inverse));
      OP_REQUIRES_OK(ctx, WithTableName(partition, ids,
                                        RouteEachId<Tid>(
                                            partition, ids, TfParallelFor(ctx),
                                            {MutableView<Tid>(local_rows),
                                             MutableView<int64_t>(splits),
                                             MutableView<int32_t>(permutation),
                                             MutableView<int32_t>(inverse)})));
      return;
    }
    Route<Tid> route;
    OP_REQUIRES_OK(ctx,
                   WithTableName(partition, ids,
                                 RouteIds<Tid>(partition, ids, true, &route)));
    OP_REQUIRES_OK(ctx, SetVector<Tid>(ctx, "local_rows", route.local_rows));
    OP_REQUIRES_OK(ctx, SetVector<int64_t>(ctx, "splits", route.splits));
    OP_REQUIRES_OK(ctx,
                   SetVector<int32_t>(ctx, "permutation", route.permutation));
    OP_REQUIRES_OK(ctx, SetVector<int32_t>(ctx, "inverse", route.inverse));
  }

 private:
  // If `status` is an error about an id, returns an error that also contains
  // the name of the table.
  absl::Status WithTableName(const RowPartition& partition, Span<const Tid> ids,
                             const Status& status) const {
    if (status.ok()) return absl::OkStatus();
    TF_RETURN_IF_ERROR(ToTf(CheckIds(ids, partition.num_rows(), table_)));
    return ToTf(status);
  }

  Placement placement_;
  bool unique_;
  std::string table_;
};

template <typename Tid>
class FindUniqueRowsOp : public Kernel {
 public:
  explicit FindUniqueRowsOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    std::string combiner;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("combiner", &combiner));
    OP_REQUIRES_OK(ctx, ToTf(ParseCombiner(combiner, &spec_.combiner)));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_rows", &spec_.num_rows));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("feature", &spec_.feature));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table", &spec_.table));
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor* id_values;
    const Tensor* row_splits;
    const Tensor* weights;
    OP_REQUIRES_OK(ctx, GetInput(ctx, "ids", 1, &id_values));
    OP_REQUIRES_OK(ctx, GetInput(ctx, "row_splits", 1, &row_splits));
    OP_REQUIRES_OK(ctx, GetInput(ctx, "weights", 1, &weights));
    FeatureInput<Tid> input;
    input.ids = View<Tid>(*id_values);
    input.splits = View<int64_t>(*row_splits);
    input.num_samples = input.splits.size() - 1;
    input.weights = View<float>(*weights);
    RaggedIds ids;
    OP_REQUIRES_OK(ctx, ToTf(RaggedIds::Make(spec_, input, &ids)));

    const Span<const uint32_t> rows = ids.rows();
    const UniqueRows unique = FindUniqueRows(
        Span<const Span<const uint32_t>>(&rows, 1), spec_.num_rows);

    std::vector<float> gains(rows.size(), 1.0f);
    std::copy(ids.gains().begin(), ids.gains().end(), gains.begin());
    OP_REQUIRES_OK(ctx, SetVector<float>(ctx, "gains", gains));
    OP_REQUIRES_OK(ctx, SetVector<Tid>(ctx, "unique_rows", unique.rows));
    OP_REQUIRES_OK(ctx,
                   SetVector<int64_t>(ctx, "unique_splits", unique.splits));
    OP_REQUIRES_OK(ctx, SetVector<int32_t>(ctx, "positions", unique.positions));
  }

 private:
  FeatureSpec spec_;
};

class PackIdsOp : public Kernel {
 public:
  explicit PackIdsOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("mark", &mark_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("names", &names_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_columns", &num_columns_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("weighted", &is_weighted_));
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor* num_samples;
    OpInputList ids, splits, weights;
    OP_REQUIRES_OK(ctx, GetInput(ctx, "num_samples", 1, &num_samples));
    OP_REQUIRES_OK(ctx, ctx->input_list("ids", &ids));
    OP_REQUIRES_OK(ctx, ctx->input_list("splits", &splits));
    OP_REQUIRES_OK(ctx, ctx->input_list("weights", &weights));
    const size_t num_features = names_.size();
    OP_REQUIRES(ctx,
                ids.size() == static_cast<int>(num_features) &&
                    num_samples->NumElements() == ids.size(),
                absl::InvalidArgumentError(
                    absl::StrCat("`names`, `ids` and `num_samples` must have "
                                 "one value per feature. Received: ",
                                 num_features, ", ", ids.size(), " and ",
                                 num_samples->NumElements())));
    std::vector<FeatureInput<int64_t>> features(num_features);
    for (int f = 0; f < ids.size(); ++f) {
      OP_REQUIRES_OK(ctx, CheckRank("ids", ids[f], 1));
      OP_REQUIRES_OK(ctx, CheckRank("splits", splits[f], 1));
      OP_REQUIRES_OK(ctx, CheckRank("weights", weights[f], 1));
      features[f].form =
          splits[f].NumElements() == 0 ? Form::kDense : Form::kRagged;
      features[f].ids = View<int64_t>(ids[f]);
      features[f].splits = View<int64_t>(splits[f]);
      features[f].num_samples = num_samples->vec<int64_t>()(f);
      features[f].weights = View<float>(weights[f]);
    }
    IdPacker packer;
    OP_REQUIRES_OK(ctx, ToTf(IdPacker::Make(names_, features, &packer)));
    const int64_t num_columns =
        num_columns_ > 0 ? num_columns_ : packer.num_columns();
    OP_REQUIRES(ctx, packer.num_columns() <= num_columns,
                absl::InvalidArgumentError(absl::StrCat(
                    "`num_columns` must be at least the number that the "
                    "longest sample requires, ",
                    packer.num_columns(), ". Received: ", num_columns)));
    TensorShape shape({packer.num_samples()});
    OP_REQUIRES_OK(ctx, shape.AddDimWithStatus(num_columns));
    Tensor* packed = nullptr;
    Tensor* packed_weights = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("packed", shape, &packed));
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output("packed_weights",
                                        is_weighted_ ? shape : TensorShape({0}),
                                        &packed_weights));
    MatrixView<float> factors;
    if (is_weighted_) {
      factors = {packed_weights->flat<float>().data(), packer.num_samples(),
                 num_columns};
    }
    packer.Write(
        mark_,
        {packed->flat<int64_t>().data(), packer.num_samples(), num_columns},
        factors);
  }

 private:
  int64_t mark_;
  std::vector<std::string> names_;
  int64_t num_columns_;
  bool is_weighted_;
};

LM_REGISTER_KERNEL("PackIds", PackIdsOp);
LM_REGISTER_ID_KERNELS("AssignPartition", AssignPartitionOp);
LM_REGISTER_ID_KERNELS("RouteIds", RouteIdsOp);
LM_REGISTER_ID_KERNELS("FindUniqueRows", FindUniqueRowsOp);

}  // namespace
}  // namespace layoutmap
