// Converts a serialized TPUEmbeddingConfiguration to the engine's
// configuration.

#ifndef TF_LAYOUTMAP_EMULATION_CONFIG_TPU_CONFIG_H_
#define TF_LAYOUTMAP_EMULATION_CONFIG_TPU_CONFIG_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/steps/engine_config.h"
#include "cc/emulation/config/optimization_parameters.h"
#include "cc/emulation/config/wire_reader.h"

namespace layoutmap {

struct TpuConfig {
  EngineConfig engine;
  // The optimizer settings of each table.
  std::vector<TpuRule> rules;
  // For each feature, the shape of its activations without the last axis.
  std::vector<std::vector<int64_t>> output_shapes;
  int32_t num_hosts = 1;
  // Number of dynamic learning rates that a step passes.
  int32_t num_rates = 0;

  // These functions return the number of activation rows of a feature on one
  // core, and per sample.
  int64_t num_outputs(size_t f) const;
  int64_t outputs_per_sample(size_t f) const;
};

// Parses a configuration. Returns an error if the bytes are malformed or if the
// engine does not support a setting. The memory use is limited by the number of
// bytes and does not depend on the values in the bytes.
Status ParseTpuConfig(Bytes bytes, TpuConfig* config);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_CONFIG_TPU_CONFIG_H_
