#include "cc/kernels/changes/row_values.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/rows/changed_rows.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/tables/gather.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/kernels/engine/engine_resource.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace layoutmap {

using tensorflow::DataType;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

absl::Status OutputsInOrder::Start(OpKernelContext* ctx, const char* name) {
  name_ = name;
  next_ = 0;
  return ctx->output_list(name, &outputs_);
}

absl::Status OutputsInOrder::Check(DataType dtype) const {
  if (next_ < outputs_.size() &&
      outputs_.expected_output_dtype(next_) == dtype) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "`", name_, "[", next_, "]` must be of dtype ",
      tensorflow::DataTypeString(dtype), ". Received: ", outputs_.size(),
      " dtypes",
      next_ < outputs_.size()
          ? absl::StrCat(", this one is ",
                         tensorflow::DataTypeString(
                             outputs_.expected_output_dtype(next_)))
          : ""));
}

absl::Status OutputsInOrder::Allocate(DataType dtype, const TensorShape& shape,
                                      Tensor** output) {
  TF_RETURN_IF_ERROR(Check(dtype));
  return outputs_.allocate(next_++, shape, output);
}

absl::Status OutputsInOrder::Set(const Tensor& value) {
  TF_RETURN_IF_ERROR(Check(value.dtype()));
  outputs_.set(next_++, value);
  return absl::OkStatus();
}

absl::Status OutputsInOrder::SetVector(Span<const int64_t> values) {
  Tensor* output = nullptr;
  TF_RETURN_IF_ERROR(
      Allocate(tensorflow::DT_INT64, TensorShape({values.size()}), &output));
  std::copy(values.begin(), values.end(), output->flat<int64_t>().data());
  return absl::OkStatus();
}

absl::Status OutputsInOrder::Finish() const {
  if (next_ == outputs_.size()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("`", name_, "` must have ", next_,
                   " tensors. Received: ", outputs_.size(), " dtypes"));
}

std::vector<int64_t> BucketOffsets(const TableSpec& table) {
  std::vector<int64_t> offsets;
  for (int64_t offset : table.partition.offsets()) {
    offsets.push_back(offset / kKeysPerBucket);
  }
  return offsets;
}

absl::Status SaveRows(OpKernelContext* ctx, const LockedShards& locked,
                      int first_shard, int first_slot, const TableSpec& table,
                      Span<const int64_t> rows, std::vector<Tensor>* values) {
  values->clear();
  const auto copy = [&](int first, const std::string& name, DataType dtype,
                        int64_t dim) {
    Tensor& value = values->emplace_back();
    TF_RETURN_IF_ERROR(
        ctx->allocate_temp(dtype, TensorShape({rows.size(), dim}), &value));
    if (rows.empty()) return absl::OkStatus();
    ShardedView<const char> view;
    TF_RETURN_IF_ERROR(
        locked.ByteView(first, name, table.partition, dtype, {dim}, &view));
    GatherRows<char>(view, rows, TfParallelFor(ctx),
                     static_cast<char*>(value.data()));
    return absl::OkStatus();
  };
  TF_RETURN_IF_ERROR(copy(first_shard, table.name,
                          table.row_type == RowType::kFloat32
                              ? tensorflow::DT_FLOAT
                              : HalfDtype(table),
                          table.dim));
  for (int j = 0; j < static_cast<int>(NumSlots(table.optimizer)); ++j) {
    TF_RETURN_IF_ERROR(copy(first_slot, table.name + " (slot variable)",
                            tensorflow::DT_FLOAT,
                            SlotDim(table.optimizer, j, table.dim)));
    first_slot += table.partition.num_shards();
  }
  return absl::OkStatus();
}

absl::Status CopyRows(OpKernelContext* ctx, const LockedShards& locked,
                      int first_shard, int first_slot, const TableSpec& table,
                      Span<const int64_t> rows, OutputsInOrder* outputs) {
  std::vector<Tensor> values;
  TF_RETURN_IF_ERROR(
      SaveRows(ctx, locked, first_shard, first_slot, table, rows, &values));
  for (const Tensor& value : values) TF_RETURN_IF_ERROR(outputs->Set(value));
  return absl::OkStatus();
}

absl::Status RestoreRows(OpKernelContext* ctx, LockedShards* locked,
                         int first_shard, int first_slot,
                         const TableSpec& table, Span<const int64_t> rows,
                         const std::vector<Tensor>& values) {
  if (rows.empty()) return absl::OkStatus();
  const auto write = [&](const auto& view, const Tensor& value) {
    const auto* from = static_cast<decltype(view.row(0))>(value.data());
    for (const int64_t row : rows) {
      std::copy(from, from + view.dim, view.row(row));
      from += view.dim;
    }
  };
  if (table.row_type == RowType::kFloat32) {
    ShardedView<float> view;
    TF_RETURN_IF_ERROR(locked->MutableView(
        ctx, first_shard, table.name, table.partition, {table.dim}, &view));
    write(view, values[0]);
  } else {
    ShardedView<uint16_t> view;
    TF_RETURN_IF_ERROR(locked->MutableView(ctx, first_shard, table.name,
                                           table.partition, {table.dim}, &view,
                                           HalfDtype(table)));
    write(view, values[0]);
  }
  for (int j = 0; j < static_cast<int>(NumSlots(table.optimizer)); ++j) {
    ShardedView<float> view;
    TF_RETURN_IF_ERROR(locked->MutableView(
        ctx, first_slot, table.name + " (slot variable)", table.partition,
        {SlotDim(table.optimizer, j, table.dim)}, &view));
    write(view, values[j + 1]);
    first_slot += table.partition.num_shards();
  }
  return absl::OkStatus();
}

absl::Status CopyLanes(OpKernelContext* ctx, const LockedShards& locked,
                       int first, const TableSpec& table,
                       Span<const int64_t> rows, OutputsInOrder* outputs) {
  constexpr DataType dtypes[kNumLaneVariables] = {
      tensorflow::DT_INT64, tensorflow::DT_INT32, tensorflow::DT_INT32};
  constexpr int64_t beyond[kNumLaneVariables] = {kEmptyKey, 0, 0};
  RowPartition buckets;
  TF_RETURN_IF_ERROR(ToTf(
      RowPartition::Make(Placement::kOffsets, BucketOffsets(table), &buckets)));
  const int64_t num_lanes = buckets.num_rows() * kKeysPerBucket;
  for (int v = 0; v < kNumLaneVariables; ++v) {
    ShardedView<const char> view;
    TF_RETURN_IF_ERROR(locked.ByteView(first, table.name + " (vocabulary)",
                                       buckets, dtypes[v], {kKeysPerBucket},
                                       &view));
    first += buckets.num_shards();
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(
        outputs->Allocate(dtypes[v], TensorShape({rows.size()}), &output));
    const int64_t size = tensorflow::DataTypeSize(dtypes[v]);
    char* to = static_cast<char*>(output->data());
    view.WithRow([&](auto bucket_of) {
      for (const int64_t row : rows) {
        // The first bytes of the int64 are the value in a smaller dtype. This
        // requires a little-endian machine, which the code for 16-bit rows also
        // requires.
        const char* from =
            row < num_lanes
                ? bucket_of(row / kKeysPerBucket) + row % kKeysPerBucket * size
                : reinterpret_cast<const char*>(&beyond[v]);
        std::memcpy(to, from, size);
        to += size;
      }
    });
  }
  return absl::OkStatus();
}

absl::Status TakeChangedRows(
    OpKernelContext* ctx, const std::vector<const char*>& inputs,
    ChangedRows* changed,
    const std::function<
        absl::Status(const LockedShards& locked,
                     const std::vector<std::vector<int64_t>>& rows)>& copy) {
  int64_t watch;
  tensorflow::OpInputList also;
  TF_RETURN_IF_ERROR(GetScalar(ctx, "watch", &watch));
  TF_RETURN_IF_ERROR(ctx->input_list("also", &also));
  std::vector<std::vector<int64_t>> besides, rows;
  for (int t = 0; t < also.size(); ++t) {
    const Span<const int64_t> view = View<int64_t>(also[t]);
    besides.emplace_back(view.begin(), view.end());
  }
  // Writes to the variables wait until the op ends, so the op does no other
  // work.
  LockedShards locked;
  TF_RETURN_IF_ERROR(locked.Lock(ctx, inputs, LockedShards::Mode::kShared));
  TF_RETURN_IF_ERROR(ToTf(changed->Take(watch, besides, &rows)));
  const absl::Status copied = CatchAllTf([&] { return copy(locked, rows); });
  if (!copied.ok()) {
    for (size_t t = 0; t < rows.size(); ++t) {
      changed->Note(static_cast<int32_t>(t), rows[t]);
    }
  }
  return copied;
}

}  // namespace layoutmap
