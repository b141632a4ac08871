#include "cc/core/vocabulary/write_keys.h"

#include <cstdint>
#include <vector>

#include "cc/core/base/parallel_for_test.h"
#include "cc/core/base/row_type.h"
#include "cc/core/tables/table_test.h"
#include "cc/core/vocabulary/vocabulary_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

TEST(WriteKeysTest, NewKeysGetRowsWithoutEvictions) {
  TestVocabulary one(8, VocabularyPolicy());
  ASSERT_TRUE(one.Admit({1, 2, 3}, {4, 4, {}}).ok());
  const std::vector<int64_t> keys = {9, 2, 10, 11, 12, 13, 14, 15};
  std::vector<int64_t> rows(keys.size());
  WrittenKeys written;
  ASSERT_TRUE(
      WriteKeys(one.layout(), {keys, {}, {}}, 5, one.state(), rows, &written)
          .ok());
  EXPECT_EQ(written.new_keys.size(), 5u);
  EXPECT_EQ(written.num_full, 2);
  EXPECT_EQ(rows, one.Find(keys));
  EXPECT_EQ(rows[6], kNoRow);
  EXPECT_EQ(rows[7], kNoRow);
  for (int64_t key : {1, 2, 3, 9, 13}) EXPECT_NE(one.Find({key})[0], kNoRow);
  EXPECT_EQ(*one.state().last_step.row(0), 4);
  // New keys have the last step 5 and the count 1.
  EXPECT_EQ(one.state().last_step.row(0)[rows[0]], 5);
  EXPECT_EQ(one.state().count.row(0)[rows[0]], 1);
}

TEST(WriteKeysTest, TheLastStepOfAKnownKeyDoesNotDecrease) {
  TestVocabulary one(8, VocabularyPolicy());
  ASSERT_TRUE(one.Admit({1}, {4, 4, {}}).ok());
  ASSERT_TRUE(one.Admit({2}, {9, 9, {}}).ok());
  const std::vector<int64_t> keys = {1, 2, 3};
  const std::vector<int32_t> last_steps = {7, 7, 7}, counts = {5, 6, 0};
  std::vector<int64_t> rows(keys.size());
  WrittenKeys written;
  ASSERT_TRUE(WriteKeys(one.layout(), {keys, last_steps, counts}, 9,
                        one.state(), rows, &written)
                  .ok());
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(one.state().last_step.row(0)[rows[i]], i == 1 ? 9 : 7);
    EXPECT_EQ(one.state().count.row(0)[rows[i]], counts[i]);
  }
}

TEST(WriteKeysTest, InvalidArgumentsChangeNothing) {
  TestVocabulary one(64, VocabularyPolicy(), 2);
  ASSERT_TRUE(one.Admit({1, 2, 3}, {1, 1, {}}).ok());
  const std::vector<int64_t> before = one.Bits();
  std::vector<int64_t> rows(3);
  WrittenKeys written;
  const auto write = [&](const std::vector<int64_t>& keys,
                         const std::vector<int32_t>& last_steps,
                         const std::vector<int32_t>& counts) {
    return WriteKeys(one.layout(), {keys, last_steps, counts}, 5, one.state(),
                     rows, &written)
        .ok();
  };
  EXPECT_FALSE(write({7, 8, 7}, {}, {}));
  EXPECT_FALSE(write({7, 8, kEmptyKey}, {}, {}));
  EXPECT_FALSE(write({7, 8, 9}, {1, 2}, {}));
  EXPECT_FALSE(write({7, 8, 9}, {1, 2, 6}, {}));
  EXPECT_FALSE(write({7, 8, 9}, {-1, 2, 5}, {}));
  EXPECT_FALSE(write({7, 8, 9}, {}, {1, -1, 1}));
  EXPECT_FALSE(write({7, 8, 9}, {}, {1}));
  EXPECT_EQ(one.Bits(), before);
  EXPECT_TRUE(write({7, 8, 9}, {1, 2, 5}, {0, 1, 1}));
  EXPECT_TRUE(write({}, {}, {}));
}

TEST(WriteRowValuesTest, WritesTheGivenValuesAndInitialValues) {
  const RowPartition partition =
      MakePartition(Placement::kOffsets, std::vector<int64_t>{0, 16, 41});
  for (const bool has_rows : {false, true}) {
    TestTable table(partition, 3, 1), slot(partition, 2, 2);
    TestTable old_table = table, old_slot = slot;
    FirstRows first;
    first.values.a = 7.0f;
    first.table = table.MutableView();
    first.slots = {slot.MutableView()};
    first.slot_values = {0.25f};
    // Key 50 is known, key 51 is new, and the third key has no row.
    const std::vector<int64_t> rows = {5, 30, kNoRow};
    WrittenKeys written;
    written.new_keys = {{30, 51, kEmptyKey}};
    const std::vector<float> values = {1, 2, 3, 4, 5, 6, 8, 8, 8};
    const std::vector<float> slots = {11, 12, 13, 14, 18, 18};
    RowValues to_write;
    if (has_rows) to_write.rows = values.data();
    to_write.slots = {has_rows ? nullptr : slots.data()};
    WriteRowValues(first, written, rows, to_write, UnevenFor(4));
    for (int64_t row = 0; row < 41; ++row) {
      const int64_t i = row == 5 ? 0 : row == 30 ? 1 : 2;
      for (int64_t c = 0; c < 3; ++c) {
        const float expected = i == 2 || (i == 0 && !has_rows)
                                   ? old_table.row(row)[c]
                               : has_rows ? values[3 * i + c]
                                          : 7.0f;
        EXPECT_EQ(table.row(row)[c], expected) << row;
      }
      for (int64_t c = 0; c < 2; ++c) {
        const float expected = i == 2 || (i == 0 && has_rows)
                                   ? old_slot.row(row)[c]
                               : has_rows ? 0.25f
                                          : slots[2 * i + c];
        EXPECT_EQ(slot.row(row)[c], expected) << row;
      }
    }
  }
}

TEST(WriteRowValuesTest, Writes16BitRows) {
  const RowPartition partition =
      MakePartition(Placement::kOffsets, std::vector<int64_t>{0, 8});
  std::vector<uint16_t> bits(16, 3);
  FirstRows table;
  table.row_type = RowType::kBfloat16;
  table.half_table = {&partition, {bits.data()}, 2};
  const std::vector<int64_t> rows = {kNoRow, 2, 7};
  const std::vector<uint16_t> values = {1, 1, 20, 21, 70, 71};
  WriteRowValues(table, WrittenKeys(), rows, {values.data(), {}}, SerialFor);
  EXPECT_EQ(bits, (std::vector<uint16_t>{3, 3, 3, 3, 20, 21, 3, 3, 3, 3, 3, 3,
                                         3, 3, 70, 71}));
}

}  // namespace
}  // namespace layoutmap
