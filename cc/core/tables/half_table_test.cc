#include "cc/core/tables/half_table.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "cc/core/base/parallel_for_test.h"
#include "cc/core/base/row_type.h"
#include "cc/core/optimizers/apply.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/core/tables/table_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

constexpr CpuLevel kLevels[] = {CpuLevel::kBaseline, CpuLevel::kAvx2,
                                CpuLevel::kAvx512};
constexpr RowType kTypes[] = {RowType::kBfloat16, RowType::kFloat16};

float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Rounds `values` with one call, as a single row.
std::vector<uint16_t> RoundRow(CpuLevel level, RowType type, uint64_t key,
                               const std::vector<float>& values) {
  std::vector<uint16_t> halves(values.size());
  uint16_t* row = halves.data();
  RoundArgs args;
  args.row_type = type;
  args.rows = values.data();
  args.noise_keys = &key;
  args.num_rows = 1;
  args.dim = values.size();
  args.row_of = &row;
  RowKernelsFor(level).round(args);
  return halves;
}

std::vector<float> ExpandRow(CpuLevel level, RowType type,
                             const std::vector<uint16_t>& halves) {
  std::vector<float> values(halves.size());
  std::vector<const uint16_t*> row_of(1 + kAhead, halves.data());
  ExpandArgs args;
  args.row_type = type;
  args.row_of = row_of.data();
  args.num_rows = 1;
  args.dim = halves.size();
  args.rows = values.data();
  RowKernelsFor(level).expand(args);
  return values;
}

TEST(RowTypeTest, EveryHalfIsRestoredExactly) {
  std::vector<uint16_t> all(1 << 16);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (RowType type : kTypes) {
    const uint16_t infinity = type == RowType::kBfloat16 ? 0x7f80 : 0x7c00;
    for (CpuLevel level : kLevels) {
      if (!CpuHas(level)) continue;
      const std::vector<float> values = ExpandRow(level, type, all);
      const std::vector<uint16_t> back = RoundRow(level, type, 17, values);
      for (size_t i = 0; i < all.size(); ++i) {
        if ((all[i] & 0x7fff) > infinity) {
          ASSERT_TRUE(std::isnan(values[i]));
          ASSERT_GT(back[i] & 0x7fff, infinity);
        } else {
          ASSERT_EQ(back[i], all[i]);
        }
      }
    }
  }
}

TEST(RowTypeTest, EveryLevelRoundsToTheSameNeighbor) {
  std::mt19937 random(3);
  std::vector<float> values;
  for (int i = 0; i < 100001; ++i) values.push_back(FromBits(random()));
  for (RowType type : kTypes) {
    const std::vector<uint16_t> expected =
        RoundRow(CpuLevel::kBaseline, type, 5, values);
    for (CpuLevel level : kLevels) {
      if (!CpuHas(level)) continue;
      EXPECT_EQ(RoundRow(level, type, 5, values), expected);
    }
    const std::vector<float> near =
        ExpandRow(CpuLevel::kBaseline, type, expected);
    const float largest = type == RowType::kBfloat16 ? 3.3895314e38f : 65504.0f;
    // The relative size of one unit in the last place, and the distance between
    // subnormal values.
    const float part = type == RowType::kBfloat16 ? 0x1p-7f : 0x1p-10f;
    const float smallest = type == RowType::kBfloat16 ? 0x1p-133f : 0x1p-24f;
    for (size_t i = 0; i < values.size(); ++i) {
      const float size = std::fabs(values[i]);
      if (std::isnan(values[i])) {
        ASSERT_TRUE(std::isnan(near[i]));
      } else if (std::isinf(values[i])) {
        ASSERT_EQ(near[i], values[i]);
      } else if (size > largest) {
        ASSERT_EQ(near[i], std::copysign(largest, values[i]));
      } else {
        ASSERT_LT(std::fabs(near[i] - values[i]),
                  std::max(size * part, smallest));
      }
    }
  }
}

// A sharded table of 16-bit rows with a float accumulator.
struct HalfTrained {
  std::vector<uint16_t> rows;
  TestTable accumulators;

  HalfTrained(const RowPartition& partition, int64_t dim)
      : rows(partition.num_rows() * dim), accumulators(partition, dim, 1) {
    std::mt19937 random(4);
    for (uint16_t& value : rows) value = 0x3800 + random() % 0x400;
    for (std::vector<float>& shard : accumulators.shards()) {
      for (float& value : shard) value = std::fabs(value) + 0.1f;
    }
  }

  HalfTable View(RowType type) {
    const RowPartition& partition = accumulators.partition();
    HalfTable table;
    table.type = type;
    table.noise_key = NoiseKey(1, 2, 3);
    table.rows.partition = &partition;
    table.rows.dim = accumulators.dim();
    for (int32_t s = 0; s < partition.num_shards(); ++s) {
      table.rows.shards.push_back(rows.data() +
                                  partition.offsets()[s] * accumulators.dim());
    }
    return table;
  }
};

TEST(RowTypeTest, UpdatesAreBitwiseIdenticalForAllLevelsAndWorkers) {
  constexpr int64_t kNumRows = 300, kDim = 21;
  const RowPartition partition =
      MakePartition(Placement::kDiv, EvenOffsets(kNumRows, 3));
  std::vector<uint32_t> rows, gradient_of;
  std::vector<int64_t> splits = {0};
  for (uint32_t row = 0; row < kNumRows; row += 1 + row % 3) {
    rows.push_back(row);
    for (uint32_t i = 0; i <= row % 4; ++i) {
      gradient_of.push_back((row + i) % 5);
    }
    splits.push_back(gradient_of.size());
  }
  const std::vector<float> values = RandomFloats(5 * kDim, 7);
  std::vector<const float*> gradient_rows;
  for (int i = 0; i < 5; ++i) gradient_rows.push_back(&values[i * kDim]);
  RowGradients gradients;
  gradients.rows = rows;
  gradients.splits = splits;
  gradients.gradient_of = gradient_of;
  gradients.gradient_rows = gradient_rows;
  const std::vector<float> rate = {0.3f};
  for (RowType type : kTypes) {
    std::vector<uint16_t> expected;
    for (CpuLevel level : kLevels) {
      if (!CpuHas(level)) continue;
      for (int num_workers : {1, 2, 8}) {
        HalfTrained trained(partition, kDim);
        const std::vector<ShardedView<float>> slots = {
            trained.accumulators.MutableView()};
        ApplyGradients(Optimizer::kAdagrad, rate, gradients, trained.View(type),
                       slots, RowKernelsFor(level), UnevenFor(num_workers));
        if (expected.empty()) expected = trained.rows;
        EXPECT_EQ(trained.rows, expected);
      }
    }
  }
}

TEST(RowTypeTest, NoiseKeysDependOnSeedTableStepAndRow) {
  const uint64_t key = NoiseKeyOfRow(NoiseKey(1, 2, 3), 4);
  EXPECT_EQ(key, NoiseKeyOfRow(NoiseKey(1, 2, 3), 4));
  EXPECT_NE(key, NoiseKeyOfRow(NoiseKey(2, 2, 3), 4));
  EXPECT_NE(key, NoiseKeyOfRow(NoiseKey(1, 3, 3), 4));
  EXPECT_NE(key, NoiseKeyOfRow(NoiseKey(1, 2, 4), 4));
  EXPECT_NE(key, NoiseKeyOfRow(NoiseKey(1, 2, 3), 5));
}

}  // namespace
}  // namespace layoutmap
