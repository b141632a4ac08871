// Reads the settings of a table from a serialized message of type
// OptimizationParameters.

#ifndef TF_LAYOUTMAP_EMULATION_CONFIG_OPTIMIZATION_PARAMETERS_H_
#define TF_LAYOUTMAP_EMULATION_CONFIG_OPTIMIZATION_PARAMETERS_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/steps/engine_config.h"
#include "cc/emulation/config/wire_reader.h"

namespace layoutmap {

// The hyperparameters of a table, in the order of
// cc/core/optimizers/optimizer.h. The first hyperparameter is the learning
// rate. If it is dynamic, each step passes its value.
struct TpuRule {
  std::vector<float> hyperparameters;
  // Index of the dynamic learning rate in the rates that a step passes, or -1.
  int32_t dynamic_rate = -1;
};

// Reads the optimizer and the quantization of `table`. The name of the table
// must be set. Returns an error if a setting is not supported by the engine.
Status ReadOptimizationParameters(Bytes bytes, TableSpec* table, TpuRule* rule);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_CONFIG_OPTIMIZATION_PARAMETERS_H_
