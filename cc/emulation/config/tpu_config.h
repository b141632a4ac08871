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
  std::vector<TpuRule> rules;  // by table
  // For each feature, the shape of its activations without the last axis.
  std::vector<std::vector<int64_t>> output_shapes;
  int32_t num_hosts = 1;
  int32_t num_rates = 0;  // dynamic learning rates of a step

  // Number of activation rows of a feature on one core, and per sample.
  int64_t num_outputs(size_t f) const;
  int64_t outputs_per_sample(size_t f) const;
};

// Parses a configuration. Returns an error for malformed bytes and for settings
// that the engine does not support. Memory is bounded by the number of bytes,
// not by the values in them.
Status ParseTpuConfig(Bytes bytes, TpuConfig* config);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_CONFIG_TPU_CONFIG_H_
