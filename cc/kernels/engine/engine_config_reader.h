// Reads the op attributes that describe the tables and features of a host
// engine.

#ifndef TF_LAYOUTMAP_KERNELS_ENGINE_ENGINE_CONFIG_READER_H_
#define TF_LAYOUTMAP_KERNELS_ENGINE_ENGINE_CONFIG_READER_H_

#include "absl/status/status.h"
#include "cc/core/steps/engine_config.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace layoutmap {

// Reads the attributes `table_*`, `feature_*`, `rounding_seed` and
// `out_of_range`, which host engines and worker steps have in common.
absl::Status ReadEngineConfig(tensorflow::OpKernelConstruction* ctx,
                              EngineConfig* config);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_ENGINE_ENGINE_CONFIG_READER_H_
