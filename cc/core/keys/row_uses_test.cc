#include "cc/core/keys/row_uses.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "cc/core/base/views.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

// Tests sizes below and above the limit for std::sort, and rows that have one
// to four digits.
TEST(RowUsesTest, SortMatchesTheStandardLibrary) {
  std::mt19937_64 random(3);
  for (int64_t num_rows : {1, 2, 255, 256, 257, 15632, 65536, 1 << 26}) {
    for (int64_t size : {1, 63, 64, 65, 1000}) {
      std::vector<RowUse> uses(size), spare(size);
      for (int64_t i = 0; i < size; ++i) {
        const int64_t row = i % 3 == 0 ? num_rows - 1 : random() % num_rows;
        uses[i] = MakeRowUse(row, static_cast<uint32_t>(i * 1000));
      }
      std::vector<RowUse> expected = uses;
      std::sort(expected.begin(), expected.end());
      Span<RowUse> sorted = uses, other = spare;
      SortUses(num_rows, size, &sorted, &other);
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), sorted.data()));
      EXPECT_NE(sorted.data() == uses.data(), other.data() == uses.data());
    }
  }
}

TEST(RowUsesTest, AddedUsesAreMergedWithSortedUses) {
  std::mt19937_64 random(5);
  for (int64_t num_rows : {200, 70000}) {
    for (int64_t num_sorted : {0, 3, 500}) {
      for (int64_t num_added : {0, 1, 700}) {
        std::vector<RowUse> uses, spare(num_sorted + num_added);
        for (int64_t i = 0; i < num_sorted + num_added; ++i) {
          // The sorted uses have even rows. The added uses have odd rows.
          const int64_t row = random() % (num_rows / 2) * 2 + (i >= num_sorted);
          uses.push_back(MakeRowUse(row, static_cast<uint32_t>(i)));
        }
        std::sort(uses.begin(), uses.begin() + num_sorted);
        std::vector<RowUse> expected = uses;
        std::sort(expected.begin(), expected.end());
        Span<RowUse> sorted = uses, other = spare;
        SortAddedUses(num_rows, num_sorted, num_sorted + num_added, &sorted,
                      &other);
        EXPECT_TRUE(
            std::equal(expected.begin(), expected.end(), sorted.data()));
      }
    }
  }
}

TEST(RowUsesTest, EachRowIsVisitedOnceWithAllItsUses) {
  const std::vector<RowUse> uses = {MakeRowUse(2, 7), MakeRowUse(2, 9),
                                    MakeRowUse(5, 1)};
  std::vector<std::vector<int64_t>> seen;
  ForRowsOfUses(uses.data(), 3, [&](int64_t row, int64_t first, int64_t last) {
    seen.push_back({row, first, last});
  });
  EXPECT_EQ(seen, (std::vector<std::vector<int64_t>>{{2, 0, 2}, {5, 2, 3}}));
  EXPECT_EQ(RowOfUse(uses[2]), 5);
  EXPECT_EQ(PositionOfUse(uses[1]), 9u);
}

}  // namespace
}  // namespace layoutmap
