#include "cc/kernels/locked_shards.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/memory/huge_pages.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace layoutmap {

using tensorflow::Tensor;
using tensorflow::TensorShape;

absl::Status CheckNumVariables(const std::string& needs, const char* input,
                               int64_t expected, int64_t received) {
  if (expected == received) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      needs, " ", expected, " `", input, "`. Received: ", received));
}

absl::Status VariableList::Add(tensorflow::OpKernelContext* ctx,
                               const char* input) {
  tensorflow::OpInputList handles;
  TF_RETURN_IF_ERROR(ctx->input_list(input, &handles));
  for (int i = 0; i < handles.size(); ++i) {
    TF_RETURN_IF_ERROR(CheckRank(input, handles[i], 0));
    const auto& handle = handles[i].scalar<tensorflow::ResourceHandle>()();
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    const absl::Status found =
        tensorflow::LookupResource(ctx, handle, &variable);
    if (absl::IsNotFound(found)) {
      return absl::FailedPreconditionError(
          absl::StrCat("`", input, "[", i, "]`: variable '", handle.name(),
                       "' is not initialized"));
    }
    TF_RETURN_IF_ERROR(found);
    variables_.push_back(std::move(variable));
  }
  return absl::OkStatus();
}

void VariableList::Add(const VariableList& other, int first, int last) {
  for (int i = first; i < last; ++i) {
    tensorflow::Var* const variable = other.variables_[i].get();
    variable->Ref();
    variables_.emplace_back(variable);
  }
}

absl::Status VariableList::SetLockOrder(bool is_written) {
  mutexes_.clear();
  mutexes_.reserve(variables_.size());
  for (const auto& variable : variables_) mutexes_.push_back(variable->mu());
  std::sort(mutexes_.begin(), mutexes_.end(), std::less<Mutex>());
  mutexes_.erase(std::unique(mutexes_.begin(), mutexes_.end()), mutexes_.end());
  if (is_written && mutexes_.size() < variables_.size()) {
    // If two shards were the same variable, two threads could write to the same
    // row at the same time.
    return absl::InvalidArgumentError(
        "Each shard and each slot shard must be a separate variable. "
        "Received: the same variable twice");
  }
  return absl::OkStatus();
}

LockedShards::~LockedShards() {
  if (!is_locked_) return;
  for (VariableList::Mutex mu : list_->mutexes_) {
    if (mode_ == Mode::kShared) {
      mu->unlock_shared();
    } else {
      mu->unlock();
    }
  }
}

absl::Status LockedShards::Lock(tensorflow::OpKernelContext* ctx,
                                const std::vector<const char*>& inputs,
                                Mode mode) {
  for (const char* input : inputs) {
    TF_RETURN_IF_ERROR(own_.Add(ctx, input));
  }
  TF_RETURN_IF_ERROR(own_.SetLockOrder(mode == Mode::kExclusive));
  Lock(own_, mode);
  return absl::OkStatus();
}

void LockedShards::Lock(const VariableList& list, Mode mode) {
  list_ = &list;
  mode_ = mode;
  for (VariableList::Mutex mu : list.mutexes_) {
    if (mode == Mode::kShared) {
      mu->lock_shared();
    } else {
      mu->lock();
    }
  }
  is_locked_ = true;
}

absl::Status LockedShards::CheckShards(int first, const std::string& table,
                                       const RowPartition& partition,
                                       tensorflow::DataType dtype,
                                       const TensorShape& row_shape) const {
  if (first + partition.num_shards() > size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("Table '", table, "' needs ", partition.num_shards(),
                     " shards. Received: ", size() - first));
  }
  for (int s = 0; s < partition.num_shards(); ++s) {
    const Tensor& found = value(first + s);
    TensorShape expected({partition.shard_size(s)});
    TF_RETURN_IF_ERROR(expected.AppendShapeWithStatus(row_shape));
    if (!found.IsInitialized() && expected.num_elements() > 0) {
      return absl::FailedPreconditionError(absl::StrCat(
          "Table '", table, "': shard ", s, " is not initialized"));
    }
    if (found.dtype() != dtype || found.shape() != expected) {
      return absl::InvalidArgumentError(absl::StrCat(
          "Table '", table, "': shard ", s, " must be ",
          tensorflow::DataTypeString(dtype), " ", expected.DebugString(),
          ". Received: ", tensorflow::DataTypeString(found.dtype()), " ",
          found.shape().DebugString()));
    }
  }
  return absl::OkStatus();
}

absl::Status LockedShards::MutableCount(tensorflow::OpKernelContext* ctx, int i,
                                        const std::string& table,
                                        int64_t** count) {
  const Tensor& found = value(i);
  if (!found.IsInitialized() || found.dtype() != tensorflow::DT_INT64 ||
      found.dims() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("Table '", table,
                     "': `rounding_steps` must be an int64 scalar. Received: ",
                     tensorflow::DataTypeString(found.dtype()), " ",
                     found.shape().DebugString()));
  }
  TF_RETURN_IF_ERROR(OwnValue(ctx, i));
  *count = static_cast<int64_t*>(variable(i).tensor()->data());
  return absl::OkStatus();
}

absl::Status LockedShards::FirstRowShape(const std::string& table,
                                         TensorShape* row_shape) const {
  if (size() == 0 || value(0).dims() < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("Table '", table, "': a shard must have rows"));
  }
  *row_shape = value(0).shape();
  row_shape->RemoveDim(0);
  return absl::OkStatus();
}

absl::Status LockedShards::NumRows(int i, const std::string& table,
                                   int64_t* num_rows) const {
  const Tensor& found = value(i);
  if (!found.IsInitialized() || found.dims() < 1) {
    return absl::FailedPreconditionError(absl::StrCat(
        "Table '", table, "': a shard is not initialized, or has no rows"));
  }
  *num_rows = found.dim_size(0);
  return absl::OkStatus();
}

absl::Status LockedShards::ByteView(int first, const std::string& table,
                                    const RowPartition& partition,
                                    tensorflow::DataType dtype,
                                    const TensorShape& row_shape,
                                    ShardedView<const char>* view) const {
  if (!tensorflow::DataTypeCanUseMemcpy(dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("Table '", table,
                     "': rows must have a dtype with a fixed size. Received: ",
                     tensorflow::DataTypeString(dtype)));
  }
  TF_RETURN_IF_ERROR(CheckShards(first, table, partition, dtype, row_shape));
  Fill(first, partition,
       row_shape.num_elements() * tensorflow::DataTypeSize(dtype), view);
  return absl::OkStatus();
}

absl::Status LockedShards::Copy(tensorflow::OpKernelContext* ctx, int i,
                                Tensor* copy) const {
  if (i >= size() || !value(i).IsInitialized() ||
      !tensorflow::DataTypeCanUseMemcpy(value(i).dtype())) {
    return absl::FailedPreconditionError(
        absl::StrCat("Variable ", i, " of ", size(),
                     " must exist, be initialized and have a numeric dtype"));
  }
  const Tensor& found = value(i);
  TF_RETURN_IF_ERROR(ctx->allocate_temp(found.dtype(), found.shape(), copy));
  std::memcpy(copy->data(), found.data(), found.TotalBytes());
  return absl::OkStatus();
}

std::vector<MemoryRange> LockedShards::Memory() const {
  std::vector<MemoryRange> found;
  found.reserve(size());
  for (int i = 0; i < size(); ++i) {
    found.push_back({value(i).data(), value(i).TotalBytes()});
  }
  return found;
}

absl::Status LockedShards::OwnValue(tensorflow::OpKernelContext* ctx, int i) {
  Tensor* value = variable(i).tensor();
  if (value->RefCountIsOne() || value->NumElements() == 0) {
    return absl::OkStatus();
  }
  Tensor copy;
  TF_RETURN_IF_ERROR(ctx->allocate_temp(value->dtype(), value->shape(), &copy));
  AdviseHugePages(copy.data(), copy.TotalBytes());
  if (value->dtype() == tensorflow::DT_STRING) {
    copy.flat<tensorflow::tstring>() = value->flat<tensorflow::tstring>();
  } else {
    std::memcpy(copy.data(), value->data(), value->TotalBytes());
  }
  *value = copy;
  return absl::OkStatus();
}

}  // namespace layoutmap
