#include "cc/core/servers/wire.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/parallel_for_test.h"
#include "cc/core/base/views.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

TEST(WireTest, Bfloat16IsRoundedToNearestEven) {
  EXPECT_EQ(NearestBfloat16(1.0f), 0x3f80);
  EXPECT_EQ(NearestBfloat16(FromBits(0x3f808000)), 0x3f80);  // a tie
  EXPECT_EQ(NearestBfloat16(FromBits(0x3f818000)), 0x3f82);  // another
  EXPECT_EQ(NearestBfloat16(FromBits(0x3f808001)), 0x3f81);
  EXPECT_EQ(NearestBfloat16(FromBits(0xbf807fff)), 0xbf80);
  EXPECT_EQ(NearestBfloat16(-0.0f), 0x8000);
}

TEST(WireTest, FiniteValuesStayFiniteAndOthersAreUnchanged) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(NearestBfloat16(std::numeric_limits<float>::max()), 0x7f7f);
  EXPECT_EQ(NearestBfloat16(-infinity), 0xff80);
  EXPECT_EQ(NearestBfloat16(FromBits(0x7f800001)), 0x7fc0);
}

TEST(WireTest, TheRoundingErrorIsWithinItsBound) {
  for (uint32_t bits = 0x00800000; bits < 0x7f7f0000; bits += 9973) {
    const float value = FromBits(bits);
    uint16_t half;
    float back;
    ToBfloat16(std::vector<float>{value}, SerialFor, &half);
    FromBfloat16(std::vector<uint16_t>{half}, SerialFor, &back);
    ASSERT_LE(std::abs(back - value), std::ldexp(value, -8)) << bits;
  }
}

std::vector<uint8_t> Written(const std::vector<uint32_t>& rows) {
  std::vector<uint8_t> bytes;
  RowWriter writer(&bytes);
  for (const uint32_t row : rows) writer.Add(row);
  return bytes;
}

TEST(WireTest, WrittenRowsCanBeRead) {
  for (const std::vector<uint32_t>& rows : std::vector<std::vector<uint32_t>>{
           {}, {0}, {5, 5, 5}, {127, 128, 1000000, UINT32_MAX}}) {
    std::vector<uint8_t> bytes = Written(rows);
    bytes.push_back(7);  // This byte belongs to the next piece.
    Span<const uint8_t> rest = bytes;
    std::vector<uint32_t> found;
    uint64_t bad;
    EXPECT_EQ(ReadRows(rows.size(), int64_t{1} << 32, &rest, &found, &bad),
              RowsRead::kAll);
    EXPECT_EQ(found, rows);
    ASSERT_EQ(rest.size(), 1);
    EXPECT_EQ(rest[0], 7);
  }
  EXPECT_EQ(Written({100, 200, 201}).size(), 3u);
}

TEST(WireTest, MissingAndOutOfRangeRowsAreRejected) {
  const auto read = [](std::vector<uint8_t> bytes, int64_t count,
                       int64_t num_rows) {
    Span<const uint8_t> rest = bytes;
    std::vector<uint32_t> rows;
    uint64_t bad = 0;
    const RowsRead found = ReadRows(count, num_rows, &rest, &rows, &bad);
    EXPECT_EQ(bad, found == RowsRead::kOutOfRange ? 9u : 0u);
    return found;
  };
  EXPECT_EQ(read({4}, 2, 9), RowsRead::kTooFew);
  EXPECT_EQ(read({4}, int64_t{1} << 60, 9), RowsRead::kTooFew);
  EXPECT_EQ(read({0x80}, 1, 9), RowsRead::kTooFew);
  EXPECT_EQ(read({0x80, 0x80, 0x80, 0x80, 0x80, 0}, 1, 9), RowsRead::kTooFew);
  EXPECT_EQ(read({4, 5}, 2, 9), RowsRead::kOutOfRange);
  EXPECT_EQ(read({9}, 1, 0), RowsRead::kOutOfRange);
}

}  // namespace
}  // namespace layoutmap
