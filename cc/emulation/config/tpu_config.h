// What a serialized TPUEmbeddingConfiguration says, in the engine's words.

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
  // By feature: the shape of its activations without the last axis.
  std::vector<std::vector<int64_t>> output_shapes;
  int32_t num_hosts = 1;
  int32_t num_rates = 0;  // dynamic learning rates of a step

  // Activation rows of one core's feature, and of one of its samples.
  int64_t num_outputs(size_t f) const;
  int64_t outputs_per_sample(size_t f) const;
};

// Refuses bytes that are no configuration, and settings that the engine does
// not carry out. Memory is bounded by the number of bytes, whatever they say.
Status ParseTpuConfig(Bytes bytes, TpuConfig* config);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_CONFIG_TPU_CONFIG_H_
