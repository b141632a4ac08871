#include "cc/emulation/config/wire_reader.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cc/emulation/config/config_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

Bytes AsBytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()),
          static_cast<int64_t>(text.size())};
}

TEST(WireReaderTest, ReadsWrittenFields) {
  WireWriter writer;
  writer.Int(1, 300).Int(2, -1).Float(3, 0.5f).Text(4, "ads").Int(536870911, 7);
  const std::string text = writer.bytes;
  WireReader reader(AsBytes(text));
  WireField field;
  ASSERT_TRUE(reader.Next(&field));
  EXPECT_EQ(field.number, 1);
  EXPECT_EQ(field.AsInt(), 300);
  ASSERT_TRUE(reader.Next(&field));
  EXPECT_EQ(field.AsInt(), -1);
  // The field has another type.
  EXPECT_EQ(field.AsFloat(), 0);
  ASSERT_TRUE(reader.Next(&field));
  EXPECT_EQ(field.AsFloat(), 0.5f);
  EXPECT_EQ(field.AsInt(), 0);
  ASSERT_TRUE(reader.Next(&field));
  EXPECT_EQ(std::string(field.bytes.begin(), field.bytes.end()), "ads");
  ASSERT_TRUE(reader.Next(&field));
  EXPECT_EQ(field.number, 536870911);
  EXPECT_FALSE(reader.Next(&field));
  EXPECT_FALSE(reader.is_malformed());
}

TEST(WireReaderTest, TruncatedFieldsAreMalformed) {
  WireWriter writer;
  writer.Int(1, 300).Float(3, 0.5f).Text(4, "ads");
  const std::vector<size_t> ends = {0, 3, 8, 13};
  for (size_t size = 0; size <= writer.bytes.size(); ++size) {
    const std::string text = writer.bytes.substr(0, size);
    WireReader reader(AsBytes(text));
    WireField field;
    while (reader.Next(&field)) {
    }
    const bool whole = std::count(ends.begin(), ends.end(), size) > 0;
    EXPECT_EQ(reader.is_malformed(), !whole) << size;
  }
}

TEST(WireReaderTest, InvalidFieldsAreMalformed) {
  const std::string eleven(11, '\xff');
  for (const std::string& text :
       {std::string("\0", 1),         // The field number is 0.
        std::string("\x0b"),          // The field is a group.
        std::string("\x0f"),          // Wire type 7 does not exist.
        "\x08" + eleven,              // The number has more than 64 bits.
        std::string("\x22\x05xxxx"),  // One of five bytes is missing.
        "\x22" + std::string(9, '\xff') + "\x01"}) {  // The length is 2^64 - 1.
    WireReader reader(AsBytes(text));
    WireField field;
    EXPECT_FALSE(reader.Next(&field)) << text;
    EXPECT_TRUE(reader.is_malformed()) << text;
    EXPECT_FALSE(reader.Next(&field));
  }
}

TEST(WireReaderTest, PackedListsAreRead) {
  const std::string text = "\x03\xac\x02";
  WireReader reader(AsBytes(text));
  int64_t value;
  ASSERT_TRUE(reader.NextPacked(&value));
  EXPECT_EQ(value, 3);
  ASSERT_TRUE(reader.NextPacked(&value));
  EXPECT_EQ(value, 300);
  EXPECT_FALSE(reader.NextPacked(&value));
  EXPECT_FALSE(reader.is_malformed());
}

}  // namespace
}  // namespace layoutmap
