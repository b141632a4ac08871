// The attrs that say which tables and features there are.

#ifndef TF_LAYOUTMAP_KERNELS_ENGINE_ENGINE_CONFIG_READER_H_
#define TF_LAYOUTMAP_KERNELS_ENGINE_ENGINE_CONFIG_READER_H_

#include "absl/status/status.h"
#include "cc/core/steps/engine_config.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace layoutmap {

// All that is common to the engines of hosts and the steps of workers: the
// attrs `table_*` and `feature_*`, `rounding_seed` and `out_of_range`.
absl::Status ReadEngineConfig(tensorflow::OpKernelConstruction* ctx,
                              EngineConfig* config);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_ENGINE_ENGINE_CONFIG_READER_H_
