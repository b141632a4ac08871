#include "cc/core/vocabulary/first_rows.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cc/core/base/parallel_for_test.h"
#include "cc/core/base/row_type.h"
#include "cc/core/keys/first_values.h"
#include "cc/core/tables/table_test.h"
#include "cc/core/vocabulary/admit_keys.h"
#include "cc/core/vocabulary/vocabulary_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

double ValueOf(uint16_t bits, RowType type) {
  if (type == RowType::kBfloat16) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof(value));
    return value;
  }
  const int exponent = bits >> 10 & 31;
  const double digits = bits & 1023;
  const double magnitude = exponent == 0
                               ? std::ldexp(digits, -24)
                               : std::ldexp(1024 + digits, exponent - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}

TEST(FirstRowsTest, HalvesAreRoundedToNearest) {
  const RowPartition partition =
      MakePartition(Placement::kOffsets, std::vector<int64_t>{0, 8});
  for (RowType type : {RowType::kBfloat16, RowType::kFloat16}) {
    for (float value : {0.0f, 1.0f, -0.1f, 1.0009765f, 3e-5f, 6.2e-5f, -5.9e-8f,
                        2.9e-8f, 1e-9f, 60000.0f, 0.33325195f}) {
      std::vector<uint16_t> bits(8);
      FirstRows first;
      first.values.a = value;
      first.row_type = type;
      first.half_table = {&partition, {bits.data()}, 1};
      WriteFirstRows(first, std::vector<NewKey>{{3, 17, kEmptyKey}}, SerialFor);
      const double found = ValueOf(bits[3], type);
      for (int step : {-1, 1}) {
        const double other =
            ValueOf(static_cast<uint16_t>(bits[3] + step), type);
        if (bits[3] == 0 && step < 0) continue;
        EXPECT_LE(std::fabs(found - value), std::fabs(other - value)) << value;
      }
    }
  }
}

TEST(FirstRowsTest, WritesRowsAndSlotsOfNewKeysOnly) {
  const RowPartition partition =
      MakePartition(Placement::kOffsets, std::vector<int64_t>{0, 16, 41});
  TestTable table(partition, 3, 1), slot(partition, 2, 2);
  TestTable old_table = table, old_slot = slot;
  FirstRows first;
  first.values = {FirstValues::Kind::kUniform, -1.0f, 1.0f, 9};
  first.table = table.MutableView();
  first.slots = {slot.MutableView()};
  first.slot_values = {0.25f};
  const std::vector<NewKey> keys = {{5, 50, kEmptyKey}, {30, 51, 7}};
  WriteFirstRows(first, keys, UnevenFor(4));
  for (int64_t row = 0; row < 41; ++row) {
    const bool is_new = row == 5 || row == 30;
    std::vector<float> expected(3);
    if (is_new) FillFirstValues(first.values, row == 5 ? 50 : 51, expected);
    for (int64_t c = 0; c < 3; ++c) {
      EXPECT_EQ(table.row(row)[c],
                is_new ? expected[c] : old_table.row(row)[c]);
    }
    for (int64_t c = 0; c < 2; ++c) {
      EXPECT_EQ(slot.row(row)[c], is_new ? 0.25f : old_slot.row(row)[c]);
    }
  }
}

TEST(FirstRowsTest, AVocabularyCanBeRestored) {
  TestVocabulary one(8, VocabularyPolicy());
  ASSERT_TRUE(one.Admit({1, 2, 3}, {1, 1, {}}).ok());
  const std::vector<int64_t> before = one.Bits();
  VocabularyStep step = {2, 2, {}};
  step.keeps_old = true;
  const std::vector<int64_t> keys = {3, 4, 5, 6, 7, 8, 9, 10, 11};
  std::vector<int64_t> rows(keys.size());
  AdmittedKeys admitted;
  ASSERT_TRUE(AdmitKeys(one.layout(), one.policy(), step, keys, SerialFor,
                        one.state(), rows, &admitted)
                  .ok());
  EXPECT_NE(one.Bits(), before);
  admitted.take_back(one.state());
  EXPECT_EQ(one.Bits(), before);
}

}  // namespace
}  // namespace layoutmap
