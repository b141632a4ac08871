// Sorts the ids that one SparseCore sends to the SparseCores that own the rows,
// as TensorFlow's op SortListOfSparseCoreCooTensors does.

#ifndef TF_LAYOUTMAP_EMULATION_SPARSE_CORE_SORTED_IDS_H_
#define TF_LAYOUTMAP_EMULATION_SPARSE_CORE_SORTED_IDS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"

namespace layoutmap {

// The ids of one feature on one SparseCore. Features with the same `col_offset`
// have the same table.
struct CoreFeature {
  Span<const int32_t> rows;
  Span<const int32_t> cols;
  Span<const float> gains;
  int64_t col_offset = 0;
};

struct SortSettings {
  // Number of SparseCores of all chips, a power of two.
  int64_t num_shards = 1;
  int64_t samples_per_core = 1;
  int64_t max_ids = 1;
  int64_t max_unique_ids = 1;
  std::string table;
};

// The ids for shard s are at positions counts[s] to counts[s + 1] - 1, where
// `cols` are rows of the shard. The shape of `counts` is [num_shards + 1].
struct SortedIds {
  std::vector<int32_t> rows;
  std::vector<int32_t> cols;
  std::vector<float> gains;
  std::vector<int32_t> counts;
};

Status CheckNumShards(int64_t num_shards);

// Merges equal ids of a sample by adding their gains, and sorts the ids by
// shard, by table and by id. Returns TensorFlow's error if a shard gets more
// ids than a limit.
Status SortIds(const std::vector<CoreFeature>& features,
               const SortSettings& settings, SortedIds* sorted);

// Returns the maximum numbers of ids and of different ids of a shard.
Status CountIds(const std::vector<CoreFeature>& features, int64_t num_shards,
                int32_t* max_ids, int32_t* max_unique_ids);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_SPARSE_CORE_SORTED_IDS_H_
