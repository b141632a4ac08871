#include "cc/kernels/vocabulary/locked_first_rows.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/row_type.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/engine/key_batches.h"
#include "cc/core/engine/token_steps.h"
#include "cc/core/keys/first_values.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/vocabulary/first_rows.h"
#include "cc/kernels/engine/engine_resource.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace layoutmap {

absl::Status LockFirstRows(tensorflow::OpKernelContext* ctx,
                           LockedShards* locked, int first,
                           const TableSpec& table, const FirstValues& values,
                           FirstRows* rows) {
  rows->values = values;
  rows->row_type = table.row_type;
  return table.row_type == RowType::kFloat32
             ? locked->MutableView(ctx, first, table.name, table.partition,
                                   {table.dim}, &rows->table)
             : locked->MutableView(ctx, first, table.name, table.partition,
                                   {table.dim}, &rows->half_table,
                                   HalfDtype(table));
}

absl::Status LockFirstSlots(tensorflow::OpKernelContext* ctx,
                            LockedShards* locked, int* first,
                            const TableSpec& table, const char* attr,
                            const std::vector<float>& slot_values,
                            size_t* next_value, FirstRows* rows) {
  rows->slots.resize(NumSlots(table.optimizer));
  for (size_t j = 0; j < rows->slots.size(); ++j) {
    if (*next_value >= slot_values.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "`", attr, "` must have one value for each slot variable. Received: ",
          slot_values.size()));
    }
    rows->slot_values.push_back(slot_values[(*next_value)++]);
    TF_RETURN_IF_ERROR(locked->MutableView(
        ctx, *first, table.name + " (slot variable)", table.partition,
        {SlotDim(table.optimizer, j, table.dim)}, &rows->slots[j]));
    *first += table.partition.num_shards();
  }
  return absl::OkStatus();
}

RowsInFlight FindRowsInFlightOf(const HostEngine& engine,
                                const TokenSteps& tokens,
                                const RowSteps& row_steps,
                                const std::vector<int32_t>& tables) {
  RowsInFlight found;
  for (const int32_t table : tables) {
    const RowsInFlight here =
        FindRowsInFlight(engine, tokens, row_steps, table);
    found.oldest_step = std::min(found.oldest_step, here.oldest_step);
    found.pinned_rows.insert(found.pinned_rows.end(), here.pinned_rows.begin(),
                             here.pinned_rows.end());
  }
  if (tables.size() > 1) {
    std::vector<int64_t>& rows = found.pinned_rows;
    std::sort(rows.begin(), rows.end());
    rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  }
  return found;
}

}  // namespace layoutmap
