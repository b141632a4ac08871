// Fuzzes TPU configurations. The target checks that the bytes are rejected, or
// that they are a consistent configuration from which an engine can be created.

#include <cstddef>
#include <cstdint>
#include <memory>

#include "cc/core/base/status.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/steps/engine_config.h"
#include "cc/emulation/config/tpu_config.h"
#include "cc/fuzz/input_reader.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace layoutmap;  // NOLINT: the target is one function
  TpuConfig config;
  const Status status =
      ParseTpuConfig({data, static_cast<int64_t>(size)}, &config);
  if (!status.ok()) {
    FUZZ_CHECK(!status.message().empty());
    FUZZ_CHECK(config.rules.empty());
    return 0;
  }
  const EngineConfig& engine = config.engine;
  FUZZ_CHECK(config.rules.size() == engine.tables.size());
  FUZZ_CHECK(config.output_shapes.size() == engine.features.size());
  for (size_t t = 0; t < engine.tables.size(); ++t) {
    const TableSpec& table = engine.tables[t];
    FUZZ_CHECK(table.dim > 0 && table.partition.num_rows() > 0);
    FUZZ_CHECK(table.partition.num_shards() == config.num_hosts);
    FUZZ_CHECK(config.rules[t].dynamic_rate < config.num_rates);
  }
  for (size_t f = 0; f < engine.features.size(); ++f) {
    FUZZ_CHECK(config.num_outputs(f) > 0);
    FUZZ_CHECK(config.num_outputs(f) <= INT32_MAX);
  }
  std::unique_ptr<HostEngine> made;
  FUZZ_CHECK(HostEngine::Make(engine, &made).ok());
  return 0;
}
