// Reads the inputs of an op whose ids are keys.

#ifndef TF_LAYOUTMAP_KERNELS_VOCABULARY_KEY_INPUTS_H_
#define TF_LAYOUTMAP_KERNELS_VOCABULARY_KEY_INPUTS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/steps/engine_config.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace layoutmap {

// Reads the inputs `ids`, `splits`, `num_samples` and `weights`. Returns views
// of them, indexed by replica and then by feature.
absl::Status ReadKeyInputs(
    tensorflow::OpKernelContext* ctx, const EngineConfig& config,
    int32_t num_replicas,
    std::vector<std::vector<FeatureInput<int64_t>>>* inputs);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_VOCABULARY_KEY_INPUTS_H_
