// Splits the ids of one feature over the SparseCores of a chip, as TensorFlow's
// op ConvertToListOfSparseCoreCooTensors does.

#ifndef TF_LAYOUTMAP_EMULATION_SPARSE_CORE_COO_IDS_H_
#define TF_LAYOUTMAP_EMULATION_SPARSE_CORE_COO_IDS_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/combiner.h"

namespace layoutmap {

// Ids of samples: sample rows[i] has the id cols[i] with the gain gains[i].
struct CooIds {
  std::vector<int32_t> rows;
  std::vector<int32_t> cols;
  std::vector<float> gains;
};

// The position of a feature in a stack of tables. Counts and offsets of samples
// refer to one chip.
struct CooSettings {
  int64_t sample_count = 0;
  int64_t num_cores = 1;
  // Number of samples of the stack before the first sample of this feature.
  int64_t row_offset = 0;
  // First row of the table in the stack, and the rotation of the table.
  int64_t col_offset = 0;
  int64_t col_shift = 0;
  // Number of SparseCores of all chips, a power of two.
  int64_t num_shards = 1;
  int64_t stacked_sample_count = 0;
  Combiner combiner = Combiner::kSum;
};

// The ids of one feature. `locations` is a matrix with `num_columns` columns if
// the ids are sparse, and otherwise a vector: row splits, or empty if the ids
// are dense.
struct CooInput {
  bool is_sparse = false;
  int64_t num_columns = 0;
  Span<const int32_t> locations;
  Span<const int32_t> ids;
  // [num_ids], or one value for all ids.
  Span<const float> weights;
};

Status CheckCooSettings(const CooSettings& settings);

// Returns one list of ids for each SparseCore of the chip, in `cores`. Adjacent
// equal ids of a sample are merged. Gains are computed in float32 and in id
// order, which differs from CombineGains. The settings must be valid.
Status ConvertToCoo(const CooSettings& settings, const CooInput& input,
                    std::vector<CooIds>* cores);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_SPARSE_CORE_COO_IDS_H_
