#include "cc/core/served_keys/evicted_rows.h"

#include <cstdint>
#include <cstring>
#include <list>
#include <utility>
#include <vector>

#include "cc/core/base/row_type.h"
#include "cc/core/base/views.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/vocabulary/first_rows.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

EvictedBlock BlockOf(std::vector<int64_t> keys, int64_t num_bytes) {
  EvictedBlock block;
  block.values.emplace_back(keys.size(), static_cast<char>(keys[0]));
  block.keys = std::move(keys);
  block.num_bytes = num_bytes;
  return block;
}

void Add(std::vector<int64_t> keys, EvictedRows* rows) {
  std::list<EvictedBlock> blocks;
  blocks.push_back(BlockOf(std::move(keys), 10));
  rows->Add(std::move(blocks));
}

using Keys = std::vector<int64_t>;

TEST(EvictedRowsTest, ABlockIsDeletedOnlyAfterItWasReported) {
  EvictedRows rows;
  Add({1, 2}, &rows);
  Add({3}, &rows);
  EvictedBlock block;
  EXPECT_EQ(rows.Read(0, 100, &block), 2);
  EXPECT_EQ(block.keys, (Keys{1, 2, 3}));
  EXPECT_EQ(block.values[0], (std::vector<char>{1, 1, 3}));
  EXPECT_EQ(block.num_bytes, 20);
  EXPECT_EQ(rows.Read(0, 100, &block), 2);
  EXPECT_EQ(block.keys, (Keys{1, 2, 3}));
  Add({4}, &rows);
  EXPECT_EQ(rows.Read(2, 100, &block), 3);
  EXPECT_EQ(block.keys, (Keys{4}));
  EXPECT_EQ(rows.Read(3, 100, &block), 3);
  EXPECT_TRUE(block.keys.empty());
}

TEST(EvictedRowsTest, AReadEndsAfterTheMaximumSizeAndReturnsAtLeastOneBlock) {
  EvictedRows rows;
  for (int64_t key = 0; key < 5; ++key) Add({key}, &rows);
  EvictedBlock block;
  EXPECT_EQ(rows.Read(0, 1, &block), 1);
  EXPECT_EQ(block.keys, (Keys{0}));
  EXPECT_EQ(rows.Read(1, 20, &block), 3);
  EXPECT_EQ(block.keys, (Keys{1, 2}));
}

TEST(EvictedRowsTest, ABlockContainsTheRowsOfAllVariables) {
  const std::vector<int64_t> offsets = {0, 3};
  RowPartition partition;
  ASSERT_TRUE(RowPartition::Make(Placement::kDiv, Span<const int64_t>(offsets),
                                 &partition)
                  .ok());
  std::vector<uint16_t> table = {1, 2, 3, 4, 5, 6};
  std::vector<float> slot = {7, 8, 9};
  FirstRows views;
  views.row_type = RowType::kBfloat16;
  views.half_table = {&partition, {table.data()}, 2};
  views.slots = {{&partition, {slot.data()}, 1}};
  const std::vector<int64_t> at = {2, 0};
  const EvictedBlock block =
      CopyEvicted({50, 60}, Span<const int64_t>(at), views);
  EXPECT_EQ(block.keys, (Keys{50, 60}));
  ASSERT_EQ(block.values.size(), 2u);
  std::vector<uint16_t> rows(4);
  std::vector<float> slots(2);
  ASSERT_EQ(block.values[0].size(), 8u);
  ASSERT_EQ(block.values[1].size(), 8u);
  std::memcpy(rows.data(), block.values[0].data(), 8);
  std::memcpy(slots.data(), block.values[1].data(), 8);
  EXPECT_EQ(rows, (std::vector<uint16_t>{5, 6, 1, 2}));
  EXPECT_EQ(slots, (std::vector<float>{9, 7}));
  EXPECT_EQ(block.num_bytes, 2 * 8 + 8 + 8);
}

}  // namespace
}  // namespace layoutmap
