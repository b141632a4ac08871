#include "cc/core/base/item_loops.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/parallel_for_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

// Returns the row splits of items with the given sizes. The value of the first
// row split is `first`.
std::vector<int64_t> MakeSplits(const std::vector<int64_t>& sizes,
                                int64_t first = 0) {
  std::vector<int64_t> splits = {first};
  for (int64_t size : sizes) splits.push_back(splits.back() + size);
  return splits;
}

// Returns how many times `RunItemLoops` processes each item of each loop.
std::vector<std::vector<int>> Count(
    const std::vector<std::vector<int64_t>>& splits, int64_t per_item,
    const ParallelFor& parallel_for) {
  std::vector<ItemLoop> loops;
  std::vector<std::vector<std::atomic<int>>> counts;
  for (size_t l = 0; l < splits.size(); ++l) {
    loops.push_back({splits[l], per_item, static_cast<int64_t>(1 + 7 * l)});
    counts.emplace_back(splits[l].size() - 1);
  }
  RunItemLoops(loops, parallel_for,
               [&](size_t loop, int64_t begin, int64_t end) {
                 EXPECT_LT(begin, end);
                 for (int64_t i = begin; i < end; ++i) ++counts[loop][i];
               });
  std::vector<std::vector<int>> found;
  for (const auto& loop : counts) {
    found.emplace_back(loop.begin(), loop.end());
  }
  return found;
}

std::vector<std::vector<int>> Once(
    const std::vector<std::vector<int64_t>>& splits) {
  std::vector<std::vector<int>> once;
  for (const auto& loop : splits) once.emplace_back(loop.size() - 1, 1);
  return once;
}

TEST(ItemLoopsTest, ProcessesEachItemOfEachLoopOnce) {
  const std::vector<std::vector<int64_t>> splits = {
      MakeSplits({}),           MakeSplits({3, 0, 0, 50, 1}),
      MakeSplits({0, 0}),       MakeSplits({1}),
      MakeSplits({}),           MakeSplits({0, 9, 0, 0}, 1000),
      MakeSplits({2, 2, 2, 2}), MakeSplits({0})};
  EXPECT_EQ(Count(splits, 1, SerialFor), Once(splits));
  for (int num_workers : {1, 2, 8}) {
    for (uint32_t seed = 0; seed < 50; ++seed) {
      EXPECT_EQ(Count(splits, 1, UnevenFor(num_workers, seed)), Once(splits));
    }
  }
}

TEST(ItemLoopsTest, ProcessesEachItemOfRandomLoopsOnce) {
  std::mt19937 random(3);
  for (uint32_t seed = 0; seed < 100; ++seed) {
    std::vector<std::vector<int64_t>> splits(random() % 9);
    for (auto& loop : splits) {
      std::vector<int64_t> sizes(random() % 20);
      for (int64_t& size : sizes) size = random() % 5 * (random() % 5);
      loop = MakeSplits(sizes, random() % 3);
    }
    EXPECT_EQ(Count(splits, 1 + random() % 9, UnevenFor(3, seed)),
              Once(splits));
  }
}

TEST(ItemLoopsTest, EmptyLoopsCallNoWork) {
  EXPECT_TRUE(Count({}, 1, SerialFor).empty());
  EXPECT_EQ(Count({MakeSplits({})}, 1, SerialFor),
            std::vector<std::vector<int>>(1));
}

}  // namespace
}  // namespace layoutmap
