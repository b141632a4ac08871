#include "cc/kernels/engine/batch_inputs.h"

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/status.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/ids/packed_ids.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/steps/step.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace layoutmap {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

absl::Status ReadPackedInput(OpKernelContext* ctx, int64_t mark,
                             PackedInput* input) {
  OpInputList ids, weights;
  const Tensor* num_samples;
  TF_RETURN_IF_ERROR(GetInput(ctx, "num_samples", 1, &num_samples));
  TF_RETURN_IF_ERROR(ctx->input_list("ids", &ids));
  TF_RETURN_IF_ERROR(ctx->input_list("weights", &weights));
  if (ids.size() != 1 || ids[0].dims() != 2 ||
      num_samples->NumElements() != 1 ||
      num_samples->vec<int64_t>()(0) != ids[0].dim_size(0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("A packed batch must be one matrix `ids` with a row for "
                     "each sample. Received: ",
                     ids.size(), " tensors, the first of shape ",
                     ids[0].shape().DebugString(), ", `num_samples` ",
                     num_samples->DebugString()));
  }
  input->mark = mark;
  input->ids = {ids[0].flat<int64_t>().data(), ids[0].dim_size(0),
                ids[0].dim_size(1)};
  if (weights[0].dims() == 1 && weights[0].NumElements() == 0) {
    return absl::OkStatus();
  }
  TF_RETURN_IF_ERROR(CheckRank("weights", weights[0], 2));
  input->weights = {weights[0].flat<float>().data(), weights[0].dim_size(0),
                    weights[0].dim_size(1)};
  return absl::OkStatus();
}

absl::Status CheckSplits(const Tensor& splits) {
  if (splits.dims() == 1) return absl::OkStatus();
  if (splits.dims() == 2 && splits.dim_size(1) == 2) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("`splits` must be row_splits of rank 1, or indices "
                   "[num_ids, 2]. Received: shape ",
                   splits.shape().DebugString()));
}

Form InputForm(const Tensor& splits) {
  if (splits.dims() == 2) return Form::kSparse;
  return splits.NumElements() == 0 ? Form::kDense : Form::kRagged;
}

// Returns an object that keeps the memory of the ids and splits alive.
std::shared_ptr<const void> InputTensors(OpKernelContext* ctx) {
  auto tensors = std::make_shared<std::vector<Tensor>>();
  for (const char* name : {"ids", "splits"}) {
    OpInputList list;
    if (!ctx->input_list(name, &list).ok()) return nullptr;
    tensors->insert(tensors->end(), list.begin(), list.end());
  }
  return tensors;
}

}  // namespace

template <typename Tid>
absl::Status ReadFeatureInputs(OpKernelContext* ctx,
                               std::vector<FeatureInput<Tid>>* features) {
  const Tensor* num_samples;
  OpInputList ids, splits, weights;
  TF_RETURN_IF_ERROR(ctx->input("num_samples", &num_samples));
  TF_RETURN_IF_ERROR(ctx->input_list("ids", &ids));
  TF_RETURN_IF_ERROR(ctx->input_list("splits", &splits));
  TF_RETURN_IF_ERROR(ctx->input_list("weights", &weights));
  if (num_samples->shape() != TensorShape({ids.size()})) {
    return absl::InvalidArgumentError(absl::StrCat(
        "`num_samples` must have one value per feature, [", ids.size(),
        "]. Received: shape ", num_samples->shape().DebugString()));
  }
  features->resize(ids.size());
  for (int f = 0; f < ids.size(); ++f) {
    TF_RETURN_IF_ERROR(CheckRank("ids", ids[f], 1));
    TF_RETURN_IF_ERROR(CheckRank("weights", weights[f], 1));
    TF_RETURN_IF_ERROR(CheckSplits(splits[f]));
    FeatureInput<Tid>& feature = (*features)[f];
    feature.ids = View<Tid>(ids[f]);
    feature.splits = View<int64_t>(splits[f]);
    feature.form = InputForm(splits[f]);
    feature.num_samples = num_samples->vec<int64_t>()(f);
    feature.weights = View<float>(weights[f]);
  }
  return absl::OkStatus();
}

absl::Status BatchInputs::Read(OpKernelConstruction* ctx) {
  tensorflow::DataType id_type;
  TF_RETURN_IF_ERROR(ctx->GetAttr("Tids", &id_type));
  TF_RETURN_IF_ERROR(ctx->GetAttr("packed", &is_packed_));
  TF_RETURN_IF_ERROR(ctx->GetAttr("mark", &mark_));
  if (!is_packed_ || id_type == tensorflow::DT_INT64) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("The ids of a packed batch must be int64. Received: ",
                   tensorflow::DataTypeString(id_type)));
}

template <typename Tid>
absl::Status BatchInputs::MakeBatch(OpKernelContext* ctx,
                                    const HostEngine& engine,
                                    std::shared_ptr<const Batch>* batch,
                                    Status* made, bool lookup_only) const {
  const std::shared_ptr<const void> owner =
      lookup_only ? InputTensors(ctx) : nullptr;
  if (is_packed_) {
    PackedInput input;
    TF_RETURN_IF_ERROR(ReadPackedInput(ctx, mark_, &input));
    *made = engine.MakeBatch(input, TfParallelFor(ctx), batch, owner);
    return absl::OkStatus();
  }
  std::vector<FeatureInput<Tid>> features;
  TF_RETURN_IF_ERROR(ReadFeatureInputs(ctx, &features));
  *made = engine.MakeBatch(features, TfParallelFor(ctx), batch, owner);
  return absl::OkStatus();
}

template absl::Status BatchInputs::MakeBatch<int32_t>(
    OpKernelContext*, const HostEngine&, std::shared_ptr<const Batch>*, Status*,
    bool) const;
template absl::Status BatchInputs::MakeBatch<int64_t>(
    OpKernelContext*, const HostEngine&, std::shared_ptr<const Batch>*, Status*,
    bool) const;

template absl::Status ReadFeatureInputs<int64_t>(
    OpKernelContext*, std::vector<FeatureInput<int64_t>>*);

}  // namespace layoutmap
