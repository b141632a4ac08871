// Kernels that access one shard of a table on one device. They are used with
// tf.dtensor.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/check_ids.h"
#include "cc/core/optimizers/apply.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/rows/unique_rows.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace layoutmap {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// The shard of this device. It contains the global rows [begin, begin +
// partition.num_rows()).
struct LocalShard {
  int64_t begin;
  // A partition with one shard, which contains all local rows.
  RowPartition partition;
};

absl::Status ReadShard(OpKernelContext* ctx, const LockedShards& shards,
                       const std::string& table, int64_t num_rows,
                       LocalShard* shard, TensorShape* row_shape) {
  const Tensor* index;
  TF_RETURN_IF_ERROR(ctx->input("shard_index", &index));
  if (index->NumElements() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("Table '", table,
                     "': each device must have one `shard_index`. Received: ",
                     index->NumElements()));
  }
  TF_RETURN_IF_ERROR(shards.FirstRowShape(table, row_shape));
  const int64_t size = shards.FirstNumRows();
  const int64_t offsets[] = {0, size};
  TF_RETURN_IF_ERROR(ToTf(RowPartition::Make(
      Placement::kDiv, Span<const int64_t>(offsets, 2), &shard->partition)));
  shard->begin = index->flat<int32_t>()(0) * size;
  if (row_shape->dims() != 1 || shard->begin < 0 ||
      (shard->begin > 0 && shard->begin >= num_rows + size)) {
    return absl::InvalidArgumentError(
        absl::StrCat("Table '", table, "' with ", num_rows,
                     " rows must be [num_rows, dim]. Received: shard ",
                     index->flat<int32_t>()(0), " of ", size, " rows of shape ",
                     row_shape->DebugString()));
  }
  return absl::OkStatus();
}

// Selects the ids that this shard owns. Sets `rows` to their local rows and
// `places` to their indices in `ids`.
template <typename Tid>
void SelectOwned(Span<const Tid> ids, const LocalShard& shard,
                 std::vector<uint32_t>* rows, std::vector<int64_t>* places) {
  const int64_t size = shard.partition.num_rows();
  for (int64_t i = 0; i < ids.size(); ++i) {
    const int64_t local = static_cast<int64_t>(ids[i]) - shard.begin;
    if (IsOutside(local, size)) continue;
    rows->push_back(static_cast<uint32_t>(local));
    places->push_back(i);
  }
}

template <typename Tid>
class LookupShardOp : public Kernel {
 public:
  explicit LookupShardOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table", &table_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_rows", &num_rows_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dim", &dim_));
  }

  void Run(OpKernelContext* ctx) override {
    LockedShards shards;
    OP_REQUIRES_OK(ctx,
                   shards.Lock(ctx, {"shard"}, LockedShards::Mode::kShared));
    LocalShard shard;
    TensorShape row_shape;
    OP_REQUIRES_OK(
        ctx, ReadShard(ctx, shards, table_, num_rows_, &shard, &row_shape));
    const Tensor* id_values;
    OP_REQUIRES_OK(ctx, GetInput(ctx, "ids", 1, &id_values));
    const Span<const Tid> ids = View<Tid>(*id_values);
    // Every device receives all ids, so every device returns an error if an id
    // is invalid.
    OP_REQUIRES_OK(ctx, ToTf(CheckIds(ids, num_rows_, table_)));
    ShardedView<const float> table;
    OP_REQUIRES_OK(ctx,
                   shards.View(0, table_, shard.partition, row_shape, &table));

    Tensor* partial = nullptr;
    TensorShape shape({1});
    OP_REQUIRES_OK(ctx, shape.AddDimWithStatus(ids.size()));
    OP_REQUIRES_OK(ctx, shape.AddDimWithStatus(table.dim));
    OP_REQUIRES_OK(ctx, ctx->allocate_output("partial_rows", shape, &partial));
    float* out = partial->flat<float>().data();
    const int64_t size = shard.partition.num_rows();
    TfParallelFor(ctx)(
        ids.size(), 10 + table.dim / 4, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const int64_t local = static_cast<int64_t>(ids[i]) - shard.begin;
            if (IsOutside(local, size)) {
              std::fill_n(out + i * table.dim, table.dim, 0.0f);
            } else {
              std::copy_n(table.row(local), table.dim, out + i * table.dim);
            }
          }
        });
  }

 private:
  std::string table_;
  int64_t num_rows_;
  int64_t dim_;
};

template <typename Tid>
class UpdateShardOp : public Kernel {
 public:
  explicit UpdateShardOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, GetOptimizer(ctx, &optimizer_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table", &table_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_rows", &num_rows_));
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor* id_values;
    const Tensor* gradients;
    const Tensor* hyperparameters;
    OP_REQUIRES_OK(ctx, GetInput(ctx, "ids", 1, &id_values));
    OP_REQUIRES_OK(ctx, ctx->input("gradients", &gradients));
    OP_REQUIRES_OK(ctx, ctx->input("hyperparameters", &hyperparameters));
    OP_REQUIRES_OK(ctx,
                   ToTf(CheckHyperparameters(optimizer_, table_,
                                             View<float>(*hyperparameters))));
    LockedShards shards;
    OP_REQUIRES_OK(ctx, shards.Lock(ctx, {"shard", "slots"},
                                    LockedShards::Mode::kExclusive));
    OP_REQUIRES(ctx, shards.size() == 1 + NumSlots(optimizer_),
                absl::InvalidArgumentError(absl::StrCat(
                    "Table '", table_, "': its optimizer requires ",
                    NumSlots(optimizer_),
                    " slot variables. Received: ", shards.size() - 1)));
    LocalShard shard;
    TensorShape row_shape;
    OP_REQUIRES_OK(
        ctx, ReadShard(ctx, shards, table_, num_rows_, &shard, &row_shape));
    const Span<const Tid> ids = View<Tid>(*id_values);
    OP_REQUIRES_OK(ctx, ToTf(CheckIds(ids, num_rows_, table_)));
    TensorShape expected({ids.size()});
    expected.AppendShape(row_shape);
    OP_REQUIRES(ctx, gradients->shape() == expected,
                absl::InvalidArgumentError(absl::StrCat(
                    "`gradients` for table '", table_, "' must be ",
                    expected.DebugString(), ". Received: shape ",
                    gradients->shape().DebugString())));
    std::vector<ShardedView<float>> views(shards.size());
    for (int j = 0; j < shards.size(); ++j) {
      const TensorShape slot_shape(
          {SlotDim(optimizer_, j - 1, row_shape.num_elements())});
      OP_REQUIRES_OK(
          ctx, shards.MutableView(ctx, j, table_, shard.partition,
                                  j == 0 ? row_shape : slot_shape, &views[j]));
    }

    std::vector<uint32_t> rows;
    std::vector<int64_t> places;
    SelectOwned(ids, shard, &rows, &places);
    const Span<const uint32_t> segment(rows);
    const UniqueRows unique =
        FindUniqueRows(Span<const Span<const uint32_t>>(&segment, 1),
                       shard.partition.num_rows());
    std::vector<const float*> gradient_rows(places.size());
    const float* gradient = gradients->flat<float>().data();
    for (size_t k = 0; k < places.size(); ++k) {
      gradient_rows[k] = gradient + places[k] * views[0].dim;
    }
    RowGradients row_gradients;
    row_gradients.rows = unique.rows;
    row_gradients.splits = unique.splits;
    row_gradients.gradient_of = unique.positions;
    row_gradients.gradient_rows = gradient_rows;
    ApplyGradients(optimizer_, View<float>(*hyperparameters), row_gradients,
                   views[0],
                   {views.data() + 1, static_cast<int64_t>(views.size()) - 1},
                   RowKernelsFor(CurrentCpuLevel()), TfParallelFor(ctx));
  }

 private:
  Optimizer optimizer_;
  std::string table_;
  int64_t num_rows_;
};

LM_REGISTER_ID_KERNELS("LookupShard", LookupShardOp);
LM_REGISTER_ID_KERNELS("UpdateShard", UpdateShardOp);

}  // namespace
}  // namespace layoutmap
