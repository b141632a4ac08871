#include "cc/kernels/vocabulary/key_inputs.h"

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/steps/engine_config.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace layoutmap {

using tensorflow::OpInputList;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

absl::Status ReadKeyInputs(
    OpKernelContext* ctx, const EngineConfig& config, int32_t num_replicas,
    std::vector<std::vector<FeatureInput<int64_t>>>* inputs) {
  const auto num_features = static_cast<int64_t>(config.features.size());
  const int64_t expected = num_replicas * num_features;
  const Tensor* num_samples;
  OpInputList ids, splits, weights;
  TF_RETURN_IF_ERROR(ctx->input("num_samples", &num_samples));
  TF_RETURN_IF_ERROR(ctx->input_list("ids", &ids));
  TF_RETURN_IF_ERROR(ctx->input_list("splits", &splits));
  TF_RETURN_IF_ERROR(ctx->input_list("weights", &weights));
  if (ids.size() != expected || num_samples->NumElements() != expected) {
    return absl::InvalidArgumentError(absl::StrCat(
        "A step of ", num_replicas, " replicas must have ", expected,
        " inputs, one per replica and feature, and as many `num_samples`. "
        "Received: ",
        ids.size(), " and ", num_samples->NumElements()));
  }
  inputs->resize(num_replicas);
  for (int i = 0; i < ids.size(); ++i) {
    TF_RETURN_IF_ERROR(CheckRank("ids", ids[i], 1));
    TF_RETURN_IF_ERROR(CheckRank("weights", weights[i], 1));
    if (splits[i].dims() != 1 &&
        !(splits[i].dims() == 2 && splits[i].dim_size(1) == 2)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "`splits` must be row_splits of rank 1, or indices [num_ids, 2]. "
          "Received: shape ",
          splits[i].shape().DebugString()));
    }
    FeatureInput<int64_t> input;
    input.ids = View<int64_t>(ids[i]);
    input.splits = View<int64_t>(splits[i]);
    input.form = splits[i].dims() == 2          ? Form::kSparse
                 : splits[i].NumElements() == 0 ? Form::kDense
                                                : Form::kRagged;
    input.num_samples = num_samples->flat<int64_t>()(i);
    input.weights = View<float>(weights[i]);
    (*inputs)[i / num_features].push_back(input);
  }
  return absl::OkStatus();
}

}  // namespace layoutmap
