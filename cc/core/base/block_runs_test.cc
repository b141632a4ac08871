#include "cc/core/base/block_runs.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace layoutmap {
namespace {

using Sizes = std::vector<int64_t>;

constexpr int64_t kPadding = -1;

// Returns the flat indices of the elements of a block, from the definition.
Sizes Reference(const Sizes& full, const Sizes& block, const Sizes& start,
                int64_t row_step) {
  int64_t size = 1;
  for (const int64_t one : block) size *= one;
  Sizes indices;
  for (int64_t i = 0; i < size; ++i) {
    int64_t rest = i, flat = 0, stride = 1;
    bool is_padding = false;
    for (size_t dim = full.size(); dim-- > 0;) {
      const int64_t step = dim == 0 ? row_step : 1;
      const int64_t index = start[dim] + rest % block[dim] * step;
      rest /= block[dim];
      is_padding |= index >= full[dim];
      flat += index * stride;
      stride *= full[dim];
    }
    indices.push_back(is_padding ? kPadding : flat);
  }
  return indices;
}

// Returns the same indices from the runs.
Sizes FromRuns(const BlockRuns& runs) {
  Sizes indices;
  for (int64_t i = 0; i < runs.num_runs(); ++i) {
    const BlockRuns::Run run = runs.run(i);
    for (int64_t j = 0; j < runs.run_size(); ++j) {
      indices.push_back(j < run.size ? run.first + j : kPadding);
    }
  }
  return indices;
}

TEST(BlockRunsTest, AllBlocksOfSmallTensorsMatchTheDefinition) {
  for (const Sizes& full : {Sizes{}, Sizes{5}, Sizes{3, 4}, Sizes{2, 3, 4},
                            Sizes{4, 1, 3}, Sizes{0, 2}, Sizes{2, 0}}) {
    const size_t rank = full.size();
    // Each dimension has a start in [0, 2] and a block size in [0, 4].
    int64_t num_cases = 1;
    for (size_t dim = 0; dim < rank; ++dim) num_cases *= 3 * 5;
    for (int64_t one = 0; one < num_cases; ++one) {
      Sizes start, block;
      int64_t rest = one;
      for (size_t dim = 0; dim < rank; ++dim) {
        start.push_back(rest % 3);
        block.push_back(rest / 3 % 5);
        rest /= 15;
      }
      for (const int64_t row_step : {1, 2, 5}) {
        EXPECT_EQ(FromRuns(BlockRuns(full, block, start, row_step)),
                  Reference(full, block, start, row_step));
      }
    }
  }
}

TEST(BlockRunsTest, RowsAreOneRun) {
  const BlockRuns runs({8, 3, 2}, {4, 3, 2}, {4, 0, 0}, 1);
  EXPECT_EQ(runs.num_runs(), 1);
  EXPECT_EQ(runs.run(0).first, 24);
  EXPECT_EQ(runs.run(0).size, 24);
}

TEST(BlockRunsTest, ColumnsAreOneRunPerRow) {
  const BlockRuns runs({8, 6}, {8, 3}, {0, 3}, 1);
  EXPECT_EQ(runs.num_runs(), 8);
  EXPECT_EQ(runs.run(7).first, 45);
  EXPECT_EQ(runs.run_size(), 3);
}

}  // namespace
}  // namespace layoutmap
