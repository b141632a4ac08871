// The configuration of a host engine, which consists of tables and of features
// that look up rows in the tables.

#ifndef TF_LAYOUTMAP_CORE_STEPS_ENGINE_CONFIG_H_
#define TF_LAYOUTMAP_CORE_STEPS_ENGINE_CONFIG_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cc/core/base/row_type.h"
#include "cc/core/base/status.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/simd/row_kernels.h"

namespace layoutmap {

struct TableSpec {
  std::string name;
  RowPartition partition;
  // If the engine has only a part of the table, the index of the part's first
  // row in the full table. The rounding of a 16-bit row depends on its index in
  // the full table.
  int64_t first_row = 0;
  int64_t dim = 0;
  Optimizer optimizer = Optimizer::kNone;
  RowType row_type = RowType::kFloat32;
  bool is_quantized = false;
  Quantization quantization;

  const Quantization* Quantized() const {
    return is_quantized ? &quantization : nullptr;
  }
};

struct EngineConfig {
  int32_t num_replicas = 1;
  int64_t max_pending_steps = 4;
  // Whether the engine defers each update until the lookup of the next step is
  // complete.
  bool is_pipelined = false;
  // Seed for the rounding of 16-bit rows.
  uint64_t rounding_seed = 0;
  std::vector<TableSpec> tables;
  std::vector<FeatureSpec> features;
  std::vector<int32_t> table_of_feature;

  int64_t dim_of_feature(size_t f) const {
    return tables[table_of_feature[f]].dim;
  }
};

// Returns an error if a field is invalid. The error message names the field.
Status CheckConfig(const EngineConfig& config);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_STEPS_ENGINE_CONFIG_H_
