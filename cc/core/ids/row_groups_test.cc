#include "cc/core/ids/row_groups.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace layoutmap {
namespace {

TEST(RowGroupsTest, PositionsWithoutARowGetARowOrAreSkipped) {
  const std::vector<int64_t> row_of = {4, -1, 4, 9, -1};
  RowGroups groups(5);
  groups.parts = {{0, 1, 2}, {2, 1, 1}};
  EXPECT_EQ(groups.num_rows(), 2);
  EXPECT_EQ(groups.num_positions(), 3);
  groups.Renumber(row_of);
  EXPECT_EQ(groups.number_of, (std::vector<uint32_t>{0, 1, 1, 2, 3}));
  groups.Add(row_of, 12);
  EXPECT_EQ(groups.num_rows(), 3);
  EXPECT_EQ(groups.num_positions(), 5);
  const RowGroups::Part last = groups.parts.back();
  EXPECT_EQ(groups.rows[last.first], 12u);
  EXPECT_EQ(groups.starts[last.first], 0u);
  EXPECT_EQ(groups.positions[last.first], 1u);
  EXPECT_EQ(groups.positions[last.first + 1], 4u);
}

TEST(RowGroupsTest, AddWithoutSuchPositionsChangesNothing) {
  RowGroups groups(2);
  groups.parts = {{0, 1, 2}};
  groups.Add(std::vector<int64_t>{3, 3}, 12);
  EXPECT_EQ(groups.parts.size(), 1u);
}

}  // namespace
}  // namespace layoutmap
