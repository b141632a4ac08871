// Partition assignment, scatter decomposition, unique rows.

#include "cc/core/ids/combiner.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/rows/route.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/rows/unique_rows.h"
#include "cc/kernels/kernel_util.h"

namespace layoutmap {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

template <typename Tid>
class AssignPartitionOp : public Kernel {
 public:
  explicit AssignPartitionOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, GetPlacement(ctx, &placement_));
  }

  void Run(OpKernelContext* ctx) override {
    enum { kIds, kOffsets };
    enum { kShards, kLocalRows };
    const Tensor& ids = ctx->input(kIds);
    OP_REQUIRES_OK(ctx, CheckRank("offsets", ctx->input(kOffsets), 1));
    RowPartition partition;
    OP_REQUIRES_OK(
        ctx, ToTf(RowPartition::Make(
                 placement_, View<int64_t>(ctx->input(kOffsets)), &partition)));
    Tensor* shards = nullptr;
    Tensor* local_rows = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(kShards, ids.shape(), &shards));
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(kLocalRows, ids.shape(), &local_rows));
    OP_REQUIRES_OK(ctx,
                   ToTf(AssignPartition<Tid>(partition, View<Tid>(ids),
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
  }

  void Run(OpKernelContext* ctx) override {
    enum { kIds, kOffsets };
    enum { kLocalRows, kSplits, kPermutation, kInverse };
    OP_REQUIRES_OK(ctx, CheckRank("ids", ctx->input(kIds), 1));
    OP_REQUIRES_OK(ctx, CheckRank("offsets", ctx->input(kOffsets), 1));
    RowPartition partition;
    OP_REQUIRES_OK(
        ctx, ToTf(RowPartition::Make(
                 placement_, View<int64_t>(ctx->input(kOffsets)), &partition)));
    const Span<const Tid> ids = View<Tid>(ctx->input(kIds));
    if (!unique_) {
      // Straight into the outputs: their sizes are known before.
      Tensor *local_rows, *splits, *permutation, *inverse;
      const TensorShape& shape = ctx->input(kIds).shape();
      OP_REQUIRES_OK(ctx, ctx->allocate_output(kLocalRows, shape, &local_rows));
      OP_REQUIRES_OK(ctx, ctx->allocate_output(
                              kSplits, ctx->input(kOffsets).shape(), &splits));
      OP_REQUIRES_OK(ctx,
                     ctx->allocate_output(kPermutation, shape, &permutation));
      // A quarter of the work, for which few programs have a use.
      OP_REQUIRES_OK(
          ctx, ctx->allocate_output(
                   kInverse,
                   ctx->output_required(kInverse) ? shape : TensorShape({0}),
                   &inverse));
      OP_REQUIRES_OK(
          ctx, ToTf(RouteEachId<Tid>(
                   partition, ids, TfParallelFor(ctx),
                   {MutableView<Tid>(local_rows), MutableView<int64_t>(splits),
                    MutableView<int32_t>(permutation),
                    MutableView<int32_t>(inverse)})));
      return;
    }
    Route<Tid> route;
    OP_REQUIRES_OK(ctx, ToTf(RouteIds<Tid>(partition, ids, true, &route)));
    OP_REQUIRES_OK(ctx, SetOutput(ctx, kLocalRows, route.local_rows));
    OP_REQUIRES_OK(ctx, SetOutput(ctx, kSplits, route.splits));
    OP_REQUIRES_OK(ctx, SetOutput(ctx, kPermutation, route.permutation));
    OP_REQUIRES_OK(ctx, SetOutput(ctx, kInverse, route.inverse));
  }

 private:
  Placement placement_;
  bool unique_;
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
    enum { kIds, kRowSplits, kWeights };
    enum { kGains, kUniqueRows, kUniqueSplits, kPositions };
    for (int i : {kIds, kRowSplits, kWeights}) {
      constexpr const char* kNames[] = {"ids", "row_splits", "weights"};
      OP_REQUIRES_OK(ctx, CheckRank(kNames[i], ctx->input(i), 1));
    }
    FeatureInput<Tid> input;
    input.ids = View<Tid>(ctx->input(kIds));
    input.splits = View<int64_t>(ctx->input(kRowSplits));
    input.num_samples = input.splits.size() - 1;
    input.weights = View<float>(ctx->input(kWeights));
    RaggedIds ids;
    OP_REQUIRES_OK(ctx, ToTf(RaggedIds::Make(spec_, input, &ids)));

    const Span<const uint32_t> rows = ids.rows();
    const UniqueRows unique = FindUniqueRows(
        Span<const Span<const uint32_t>>(&rows, 1), spec_.num_rows);

    std::vector<float> gains(rows.size(), 1.0f);
    std::copy(ids.gains().begin(), ids.gains().end(), gains.begin());
    OP_REQUIRES_OK(ctx, SetOutput(ctx, kGains, gains));
    OP_REQUIRES_OK(ctx, SetOutput(ctx, kUniqueRows,
                                  std::vector<Tid>(unique.rows.begin(),
                                                   unique.rows.end())));
    OP_REQUIRES_OK(ctx, SetOutput(ctx, kUniqueSplits, unique.splits));
    OP_REQUIRES_OK(ctx,
                   SetOutput(ctx, kPositions,
                             std::vector<int32_t>(unique.positions.begin(),
                                                  unique.positions.end())));
  }

 private:
  FeatureSpec spec_;
};

LM_REGISTER_ID_KERNELS("AssignPartition", AssignPartitionOp);
LM_REGISTER_ID_KERNELS("RouteIds", RouteIdsOp);
LM_REGISTER_ID_KERNELS("FindUniqueRows", FindUniqueRowsOp);

}  // namespace
}  // namespace layoutmap
