#include "cc/emulation/sparse_core/sorted_ids.h"

#include <algorithm>
#include <map>

namespace layoutmap {
namespace {

// The merged ids of all tables: the tables in ascending order of their offsets,
// and the ids of a table in ascending order. Equal ids are in input order.
struct MergedIds {
  std::vector<int32_t> rows;
  std::vector<int32_t> cols;
  std::vector<float> gains;
  // Numbers of ids and of different ids of each shard, [num_shards].
  std::vector<int32_t> num_ids;
  std::vector<int32_t> num_unique;
};

Status CheckFeature(const CoreFeature& feature) {
  if (feature.rows.size() != feature.cols.size()) {
    return InvalidArgument(
        "Row ids and col ids should have same elements. But got " +
        std::to_string(feature.rows.size()) + " elements for row ids and " +
        std::to_string(feature.cols.size()) + " elements for col ids.");
  }
  if (feature.gains.size() != feature.cols.size()) {
    return InvalidArgument(
        "Gains and col ids should have same elements. But got " +
        std::to_string(feature.gains.size()) + " elements for gains and " +
        std::to_string(feature.cols.size()) + " elements for col ids.");
  }
  for (int64_t i = 0; i < feature.cols.size(); ++i) {
    if (feature.rows[i] < 0 || feature.cols[i] < 0) {
      return InvalidArgument(
          "Row ids and col ids must not be negative. Received: row id " +
          std::to_string(feature.rows[i]) + " and col id " +
          std::to_string(feature.cols[i]) + ".");
    }
  }
  return {};
}

void MergeTable(const std::vector<const CoreFeature*>& features,
                int64_t num_shards, MergedIds* merged) {
  std::vector<int32_t> rows;
  std::vector<float> gains;
  // The id is in the upper half, and its position in the lower half.
  std::vector<uint64_t> keys;
  for (const CoreFeature* feature : features) {
    for (int64_t i = 0; i < feature->cols.size(); ++i) {
      keys.push_back((static_cast<uint64_t>(feature->cols[i]) << 32) |
                     rows.size());
      rows.push_back(feature->rows[i]);
      gains.push_back(feature->gains[i]);
    }
  }
  std::sort(keys.begin(), keys.end());
  int32_t last_row = -1;
  int32_t last_col = -1;
  for (const uint64_t key : keys) {
    const auto col = static_cast<int32_t>(key >> 32);
    const auto position = static_cast<uint32_t>(key);
    if (rows[position] == last_row && col == last_col) {
      merged->gains.back() += gains[position];
      continue;
    }
    const int64_t shard = col & (num_shards - 1);
    ++merged->num_ids[shard];
    if (col != last_col) ++merged->num_unique[shard];
    last_row = rows[position];
    last_col = col;
    merged->rows.push_back(last_row);
    merged->cols.push_back(col);
    merged->gains.push_back(gains[position]);
  }
}

Status Merge(const std::vector<CoreFeature>& features, int64_t num_shards,
             MergedIds* merged) {
  merged->num_ids.assign(num_shards, 0);
  merged->num_unique.assign(num_shards, 0);
  std::map<int64_t, std::vector<const CoreFeature*>> tables;
  for (const CoreFeature& feature : features) {
    LM_RETURN_IF_ERROR(CheckFeature(feature));
    tables[feature.col_offset].push_back(&feature);
  }
  for (const auto& table : tables) {
    MergeTable(table.second, num_shards, merged);
  }
  return {};
}

Status CheckLimit(const SortSettings& settings, int64_t shard, const char* kind,
                  int64_t count, int64_t limit) {
  if (count <= limit) return {};
  return InvalidArgument(
      "Sparse core " + std::to_string(shard) + " gets " +
      std::to_string(count) + " " + kind + " while the max " + kind +
      " per sparse core is set to be " + std::to_string(limit) + " for table " +
      settings.table);
}

}  // namespace

Status CheckNumShards(int64_t num_shards) {
  if ((num_shards & (num_shards - 1)) == 0) return {};
  return FailedPrecondition(
      "Expected num_physical_replica to be a power of two");
}

Status SortIds(const std::vector<CoreFeature>& features,
               const SortSettings& settings, SortedIds* sorted) {
  MergedIds merged;
  LM_RETURN_IF_ERROR(Merge(features, settings.num_shards, &merged));
  sorted->counts.assign(settings.num_shards + 1, 0);
  int shard_bits = 0;
  while ((int64_t{1} << shard_bits) < settings.num_shards) ++shard_bits;
  for (int64_t shard = 0; shard < settings.num_shards; ++shard) {
    LM_RETURN_IF_ERROR(CheckLimit(settings, shard, "ids", merged.num_ids[shard],
                                  settings.max_ids));
    LM_RETURN_IF_ERROR(CheckLimit(settings, shard, "unique ids",
                                  merged.num_unique[shard],
                                  settings.max_unique_ids));
    sorted->counts[shard + 1] = sorted->counts[shard] + merged.num_ids[shard];
  }
  std::vector<int32_t> next(sorted->counts.begin(), sorted->counts.end() - 1);
  const size_t num_ids = merged.rows.size();
  sorted->rows.resize(num_ids);
  sorted->cols.resize(num_ids);
  sorted->gains.resize(num_ids);
  for (size_t i = 0; i < num_ids; ++i) {
    const int32_t col = merged.cols[i];
    const int32_t place = next[col & (settings.num_shards - 1)]++;
    sorted->rows[place] =
        static_cast<int32_t>(merged.rows[i] % settings.samples_per_core);
    sorted->cols[place] = col >> shard_bits;
    sorted->gains[place] = merged.gains[i];
  }
  return {};
}

Status CountIds(const std::vector<CoreFeature>& features, int64_t num_shards,
                int32_t* max_ids, int32_t* max_unique_ids) {
  MergedIds merged;
  LM_RETURN_IF_ERROR(Merge(features, num_shards, &merged));
  *max_ids = *std::max_element(merged.num_ids.begin(), merged.num_ids.end());
  *max_unique_ids =
      *std::max_element(merged.num_unique.begin(), merged.num_unique.end());
  return {};
}

}  // namespace layoutmap
