// What a serialized OptimizationParameters says of a table.

#ifndef TF_LAYOUTMAP_EMULATION_CONFIG_OPTIMIZATION_PARAMETERS_H_
#define TF_LAYOUTMAP_EMULATION_CONFIG_OPTIMIZATION_PARAMETERS_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/steps/engine_config.h"
#include "cc/emulation/config/wire_reader.h"

namespace layoutmap {

// A table's numbers, as cc/core/optimizers/optimizer.h lists them. The first
// one, the learning rate, comes with each step if it is dynamic.
struct TpuRule {
  std::vector<float> hyperparameters;
  int32_t dynamic_rate = -1;  // which of the step's learning rates, or none
};

// Reads the optimizer and the quantization of a table, whose name is known, and
// refuses what the engine does not carry out.
Status ReadOptimizationParameters(Bytes bytes, TableSpec* table, TpuRule* rule);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_CONFIG_OPTIMIZATION_PARAMETERS_H_
