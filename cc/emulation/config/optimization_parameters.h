// Reads the settings of a table from a serialized OptimizationParameters
// message.

#ifndef TF_LAYOUTMAP_EMULATION_CONFIG_OPTIMIZATION_PARAMETERS_H_
#define TF_LAYOUTMAP_EMULATION_CONFIG_OPTIMIZATION_PARAMETERS_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/steps/engine_config.h"
#include "cc/emulation/config/wire_reader.h"

namespace layoutmap {

// Hyperparameters of a table, in the order of cc/core/optimizers/optimizer.h. A
// dynamic learning rate, which is the first hyperparameter, is passed with each
// step.
struct TpuRule {
  std::vector<float> hyperparameters;
  int32_t dynamic_rate = -1;  // index into the step's rates, or -1
};

// Reads the optimizer and the quantization of a table whose name is set.
// Returns an error for settings that the engine does not support.
Status ReadOptimizationParameters(Bytes bytes, TableSpec* table, TpuRule* rule);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_CONFIG_OPTIMIZATION_PARAMETERS_H_
