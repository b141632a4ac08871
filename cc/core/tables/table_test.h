// Helpers that create tables and ids for tests.

#ifndef TF_LAYOUTMAP_CORE_TABLES_TABLE_TEST_H_
#define TF_LAYOUTMAP_CORE_TABLES_TABLE_TEST_H_

#include <cstdint>
#include <random>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/tables/sharded_view.h"
#include "gtest/gtest.h"

namespace layoutmap {

// Returns the offsets of the placements div and mod. The offsets are computed
// row by row, as a reference.
inline std::vector<int64_t> EvenOffsets(int64_t num_rows, int64_t num_shards) {
  std::vector<int64_t> offsets = {0};
  for (int64_t s = 0; s < num_shards; ++s) {
    offsets.push_back(offsets.back() + num_rows / num_shards +
                      (s < num_rows % num_shards ? 1 : 0));
  }
  return offsets;
}

inline RowPartition MakePartition(Placement placement,
                                  const std::vector<int64_t>& offsets) {
  RowPartition partition;
  const Status status = RowPartition::Make(placement, offsets, &partition);
  EXPECT_TRUE(status.ok()) << status.message();
  return partition;
}

// Returns a random value in [-1, 1). The value uses all 24 bits of the
// mantissa, so that sums are rounded.
inline float RandomFloat(std::mt19937* random) {
  return static_cast<float>((*random)() >> 8) / (1 << 23) - 1.0f;
}

inline std::vector<float> RandomFloats(int64_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(size);
  for (float& value : values) value = RandomFloat(&random);
  return values;
}

// A table with shards for tests. Each shard is a heap allocation of its exact
// size, so that AddressSanitizer detects accesses beyond the shard.
class TestTable {
 public:
  TestTable(const RowPartition& partition, int64_t dim, uint32_t seed)
      : partition_(partition), dim_(dim) {
    for (int32_t s = 0; s < partition.num_shards(); ++s) {
      shards_.push_back(
          RandomFloats(partition.shard_size(s) * dim, seed * 1000 + s));
    }
  }

  const RowPartition& partition() const { return partition_; }
  int64_t dim() const { return dim_; }
  float* row(int64_t global_row) {
    const RowOwner owner = partition_.Locate(global_row);
    return shards_[owner.shard].data() + owner.local_row * dim_;
  }
  std::vector<std::vector<float>>& shards() { return shards_; }
  const std::vector<std::vector<float>>& shards() const { return shards_; }

  ShardedView<float> MutableView() {
    ShardedView<float> view;
    view.partition = &partition_;
    view.dim = dim_;
    for (std::vector<float>& shard : shards_) {
      view.shards.push_back(shard.data());
    }
    return view;
  }
  ShardedView<const float> View() const {
    ShardedView<const float> view;
    view.partition = &partition_;
    view.dim = dim_;
    for (const std::vector<float>& shard : shards_) {
      view.shards.push_back(shard.data());
    }
    return view;
  }

 private:
  RowPartition partition_;
  int64_t dim_;
  std::vector<std::vector<float>> shards_;
};

inline std::vector<CpuLevel> LevelsOfThisCpu() {
  std::vector<CpuLevel> levels;
  for (CpuLevel level :
       {CpuLevel::kBaseline, CpuLevel::kAvx2, CpuLevel::kAvx512}) {
    if (CpuHas(level)) levels.push_back(level);
  }
  return levels;
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_TABLES_TABLE_TEST_H_
