// Kernels for lookups of keys whose gradients the caller holds.

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/views.h"
#include "cc/core/engine/row_steps.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/kernels/engine/engine_resource.h"
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

class ReadOpenRowsOp : public Kernel {
 public:
  explicit ReadOpenRowsOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, GetPlacement(ctx, &placement_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dim", &dim_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table", &table_));
  }

  void Run(OpKernelContext* ctx) override {
    RowPartition partition;
    const Tensor* rows;
    OP_REQUIRES_OK(ctx, GetInput(ctx, "rows", 1, &rows));
    OP_REQUIRES_OK(ctx, GetPartition(ctx, placement_, &partition));
    const Span<const int64_t> ids = View<int64_t>(*rows);
    for (int64_t i = 0; i < ids.size(); ++i) {
      OP_REQUIRES(
          ctx, ids[i] >= -1 && ids[i] < partition.num_rows(),
          absl::InvalidArgumentError(absl::StrCat(
              "`rows` must be -1 or rows of table '", table_, "', which has ",
              partition.num_rows(), " rows. Received: ", ids[i])));
    }
    LockedShards shards;
    OP_REQUIRES_OK(ctx,
                   shards.Lock(ctx, {"shards"}, LockedShards::Mode::kShared));
    ShardedView<const float> table;
    OP_REQUIRES_OK(ctx, shards.View(0, table_, partition, {dim_}, &table));
    Tensor* values = nullptr;
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output("values", {ids.size(), dim_}, &values));
    float* const out = values->flat<float>().data();
    const auto work = [&](int64_t begin, int64_t end) {
      table.WithRow([&, dim = dim_](auto row_of) {
        for (int64_t i = begin; i < end; ++i) {
          float* const to = out + i * dim;
          if (ids[i] < 0) {
            std::fill_n(to, dim, 0.0f);
          } else {
            std::copy_n(row_of(ids[i]), dim, to);
          }
        }
      });
    };
    TfParallelFor(ctx)(ids.size(), 10 + dim_ / 4, work);
  }

 private:
  Placement placement_;
  int64_t dim_;
  std::string table_;
};

class MarkRowsOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    EnginePtr engine;
    int64_t token;
    const Tensor* rows;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &engine));
    OP_REQUIRES_OK(ctx, GetScalar(ctx, "token", &token));
    OP_REQUIRES_OK(ctx, GetInput(ctx, "rows", 1, &rows));
    OP_REQUIRES_OK(ctx, ToTf(engine->row_steps().Mark(token)));
    OP_REQUIRES_OK(ctx, ctx->set_output("marked", *rows));
  }
};

class RecordGradientOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    EnginePtr engine;
    const Tensor* rows;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &engine));
    OP_REQUIRES_OK(ctx, GetInput(ctx, "rows", 1, &rows));
    Tensor* recorded = nullptr;
    // The rows are copied, because several gradients may use the same tensor.
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output("recorded", rows->shape(), &recorded));
    const Span<const int64_t> from = View<int64_t>(*rows);
    std::copy_n(from.data(), from.size(), recorded->flat<int64_t>().data());
    RowSteps::RecordedRows record;
    record.rows = View<int64_t>(*recorded);
    record.is_shared = [tensor = *recorded] {
      return tensor.NumElements() > 0 && !tensor.RefCountIsOne();
    };
    engine->row_steps().Record(std::move(record));
  }
};

LM_REGISTER_KERNEL("ReadOpenRows", ReadOpenRowsOp);
LM_REGISTER_KERNEL("MarkRows", MarkRowsOp);
LM_REGISTER_KERNEL("RecordGradient", RecordGradientOp);

}  // namespace
}  // namespace layoutmap
