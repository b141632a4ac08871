// Kernels that record which rows of an engine's tables have changed, and
// kernels that copy these rows.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/views.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/steps/engine_config.h"
#include "cc/kernels/changes/row_values.h"
#include "cc/kernels/engine/engine_resource.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"

namespace layoutmap {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

class WatchChangesOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    EnginePtr resource;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &resource));
    OP_REQUIRES_OK(ctx, SetScalar(ctx, "watch", resource->changed().Watch()));
  }
};

class TakeChangesOp : public Kernel {
 public:
  explicit TakeChangesOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("open_tables", &open_tables_));
  }

  void Run(OpKernelContext* ctx) override {
    EnginePtr resource;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &resource));
    OP_REQUIRES_OK(ctx, Take(ctx, *resource));
  }

 private:
  absl::Status Take(OpKernelContext* ctx, EngineResource& resource) const {
    const std::vector<TableSpec>& tables = resource.engine().config().tables;
    std::vector<bool> is_open(tables.size());
    int num_shards = 0, num_slots = 0, num_lanes = 0;
    for (const int32_t t : open_tables_) {
      if (t < 0 || t >= static_cast<int32_t>(tables.size()) || is_open[t]) {
        return absl::InvalidArgumentError(absl::StrCat(
            "`open_tables` must be distinct tables of the engine. Received: ",
            t));
      }
      is_open[t] = true;
      num_lanes += kNumLaneVariables * tables[t].partition.num_shards();
    }
    for (const TableSpec& table : tables) {
      num_shards += table.partition.num_shards();
      num_slots += NumSlots(table.optimizer) * table.partition.num_shards();
    }
    TF_RETURN_IF_ERROR(CheckSize(ctx, "shards", num_shards));
    TF_RETURN_IF_ERROR(CheckSize(ctx, "slots", num_slots));
    TF_RETURN_IF_ERROR(CheckSize(ctx, "lanes", num_lanes));
    return TakeChangedRows(ctx, {"shards", "slots", "lanes", "whole"},
                           &resource.changed(),
                           [&](const LockedShards& locked,
                               const std::vector<std::vector<int64_t>>& rows) {
                             return Copy(ctx, tables, is_open, locked,
                                         num_shards, num_slots, rows);
                           });
  }

  static absl::Status Copy(OpKernelContext* ctx,
                           const std::vector<TableSpec>& tables,
                           const std::vector<bool>& is_open,
                           const LockedShards& locked, int num_shards,
                           int num_slots,
                           const std::vector<std::vector<int64_t>>& rows) {
    OutputsInOrder outputs;
    TF_RETURN_IF_ERROR(outputs.Start(ctx, "values"));
    int shard = 0, slot = num_shards, lane = num_shards + num_slots;
    for (size_t t = 0; t < tables.size(); ++t) {
      const int shards_here = tables[t].partition.num_shards();
      TF_RETURN_IF_ERROR(outputs.SetVector(rows[t]));
      TF_RETURN_IF_ERROR(
          CopyRows(ctx, locked, shard, slot, tables[t], rows[t], &outputs));
      shard += shards_here;
      slot += NumSlots(tables[t].optimizer) * shards_here;
      if (!is_open[t]) continue;
      TF_RETURN_IF_ERROR(
          CopyLanes(ctx, locked, lane, tables[t], rows[t], &outputs));
      lane += kNumLaneVariables * shards_here;
    }
    for (int i = lane; i < locked.size(); ++i) {
      Tensor copy;
      TF_RETURN_IF_ERROR(locked.Copy(ctx, i, &copy));
      TF_RETURN_IF_ERROR(outputs.Set(copy));
    }
    return outputs.Finish();
  }

  static absl::Status CheckSize(OpKernelContext* ctx, const char* input,
                                int expected) {
    OpInputList handles;
    TF_RETURN_IF_ERROR(ctx->input_list(input, &handles));
    return CheckNumVariables("This engine's tables need", input, expected,
                             handles.size());
  }

  std::vector<int32_t> open_tables_;
};

LM_REGISTER_KERNEL("WatchChanges", WatchChangesOp);
LM_REGISTER_KERNEL("TakeChanges", TakeChangesOp);

}  // namespace
}  // namespace layoutmap
