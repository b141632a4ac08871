#include "cc/core/simd/row_kernels.h"

#include <cstddef>
#include <set>
#include <string>

#include "gtest/gtest.h"

namespace layoutmap {
namespace {

constexpr CpuLevel kLevels[] = {CpuLevel::kBaseline, CpuLevel::kAvx2,
                                CpuLevel::kAvx512};

TEST(RowKernelsTest, EachLevelHasSeparateKernels) {
  std::set<const RowKernels*> kernels;
  size_t num_levels = 0;
  for (CpuLevel level : kLevels) {
    if (!CpuHas(level)) continue;
    ++num_levels;
    kernels.insert(&RowKernelsFor(level));
    EXPECT_NE(RowKernelsFor(level).lookup, nullptr);
    EXPECT_NE(RowKernelsFor(level).apply, nullptr);
  }
  EXPECT_EQ(kernels.size(), num_levels);
}

TEST(RowKernelsTest, CurrentLevelIsSupportedByThisCpu) {
  EXPECT_TRUE(CpuHas(CpuLevel::kBaseline));
  EXPECT_TRUE(CpuHas(CurrentCpuLevel()));
  EXPECT_EQ(CurrentCpuLevel(), CurrentCpuLevel());
}

TEST(RowKernelsTest, SupportOfALevelImpliesSupportOfLowerLevels) {
  if (CpuHas(CpuLevel::kAvx512)) {
    EXPECT_TRUE(CpuHas(CpuLevel::kAvx2));
  }
}

TEST(RowKernelsTest, LevelNamesMatchTheEnvironmentVariable) {
  EXPECT_EQ(std::string(CpuLevelName(CpuLevel::kBaseline)), "baseline");
  EXPECT_EQ(std::string(CpuLevelName(CpuLevel::kAvx2)), "avx2");
  EXPECT_EQ(std::string(CpuLevelName(CpuLevel::kAvx512)), "avx512");
}

}  // namespace
}  // namespace layoutmap
