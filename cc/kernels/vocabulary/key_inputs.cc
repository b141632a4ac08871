#include "cc/kernels/vocabulary/key_inputs.h"

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/steps/engine_config.h"
#include "cc/kernels/engine/batch_inputs.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace layoutmap {

using tensorflow::OpKernelContext;

absl::Status ReadKeyInputs(
    OpKernelContext* ctx, const EngineConfig& config, int32_t num_replicas,
    std::vector<std::vector<FeatureInput<int64_t>>>* inputs) {
  const auto num_features = static_cast<int64_t>(config.features.size());
  const int64_t expected = num_replicas * num_features;
  std::vector<FeatureInput<int64_t>> flat;
  TF_RETURN_IF_ERROR(ReadFeatureInputs(ctx, &flat));
  if (static_cast<int64_t>(flat.size()) != expected) {
    return absl::InvalidArgumentError(absl::StrCat(
        "A step of ", num_replicas, " replicas must have ", expected,
        " inputs, one per replica and feature. Received: ", flat.size()));
  }
  inputs->resize(num_replicas);
  for (int64_t i = 0; i < expected; ++i) {
    (*inputs)[i / num_features].push_back(flat[i]);
  }
  return absl::OkStatus();
}

}  // namespace layoutmap
