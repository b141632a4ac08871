#include "cc/core/served_keys/key_messages.h"

#include <cstdint>
#include <string>
#include <vector>

#include "cc/core/base/row_type.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/servers/wire.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

const std::vector<PieceSize> kSizes = {{"ads", 9, 2, 1}, {"words", 17, 3, 1}};
const std::vector<bool> kIsOpen = {false, true};

// Returns a request for rows 1 and 4 of `ads`, and for two keys of `words`. The
// first key has two uses, and the second key has one use.
KeyFetchWriter Writer() {
  KeyFetchWriter writer;
  writer.token = {1, 2, 3};
  writer.training = true;
  writer.wire = RowType::kBfloat16;
  writer.pieces.resize(2);
  writer.pieces[0].count = 2;
  RowWriter rows(&writer.pieces[0].compact);
  for (const uint32_t row : {1, 4}) rows.Add(row);
  writer.pieces[1].count = 2;
  writer.pieces[1].kind = 1;
  writer.pieces[1].keys = {-7, int64_t{1} << 40};
  RowWriter uses(&writer.pieces[1].compact);
  for (const uint32_t sum : {2, 3}) uses.Add(sum);
  return writer;
}

std::vector<uint8_t> ToBytes(const KeyFetchWriter& writer) {
  std::vector<uint8_t> bytes(writer.size());
  writer.Write(bytes.data());
  return bytes;
}

Status Read(const std::vector<uint8_t>& bytes, KeyFetchMessage* message) {
  // The memory has exactly the size of the message, so that AddressSanitizer
  // detects reads beyond the message.
  const std::vector<uint8_t> exact(bytes);
  return message->Read(exact, kSizes, kIsOpen);
}

TEST(KeyMessagesTest, WrittenMessagesCanBeRead) {
  KeyFetchMessage message;
  const std::vector<uint8_t> bytes = ToBytes(Writer());
  const Status status = Read(bytes, &message);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(KeyFetchMessage::IsTraining(bytes));
  EXPECT_TRUE(message.training);
  EXPECT_EQ(message.token.number, 2);
  EXPECT_EQ(message.wire, RowType::kBfloat16);
  EXPECT_EQ(message.rows[0], (std::vector<uint32_t>{1, 4}));
  EXPECT_EQ(message.keys[1].keys, (std::vector<int64_t>{-7, int64_t{1} << 40}));
  EXPECT_EQ(message.keys[1].times, (std::vector<uint32_t>{2, 1}));
  EXPECT_EQ(message.kinds[1], 1u);
}

TEST(KeyMessagesTest, EveryTruncatedMessageIsRejected) {
  const std::vector<uint8_t> complete = ToBytes(Writer());
  for (size_t size = 0; size < complete.size(); ++size) {
    KeyFetchMessage message;
    EXPECT_FALSE(
        Read({complete.begin(), complete.begin() + size}, &message).ok())
        << size;
  }
}

TEST(KeyMessagesTest, InvalidMessagesAreRejected) {
  const auto error_message = [](const auto& change) {
    KeyFetchWriter writer = Writer();
    change(&writer);
    KeyFetchMessage message;
    return Read(ToBytes(writer), &message).message();
  };
  EXPECT_NE(error_message([](auto* one) {
              one->wire = RowType::kFloat16;
            }).find("type 0 (float32) or 1"),
            std::string::npos);
  EXPECT_NE(error_message([](auto* one) {
              one->pieces[0].compact = {1, 9};
            }).find("rows below 9"),
            std::string::npos);
  EXPECT_NE(error_message([](auto* one) {
              one->pieces[1].compact = {1, 0};
            }).find("one use of each key"),
            std::string::npos);
  EXPECT_NE(error_message([](auto* one) {
              one->pieces[1].compact = {0xff, 0xff, 0xff, 0xff, 0x0f, 0};
            }).find("uses below"),
            std::string::npos);
  EXPECT_NE(error_message([](auto* one) {
              one->pieces[1].compact.push_back(0);
            }).find("bytes more"),
            std::string::npos);
  EXPECT_NE(error_message([](auto* one) {
              one->pieces[1].count = UINT32_MAX;
            }).find("too few"),
            std::string::npos);
}

TEST(KeyMessagesTest, ValuesStartAtAlignedOffsets) {
  EXPECT_EQ(FetchedKeysHeader(0), 8);
  EXPECT_EQ(FetchedKeysHeader(1), 16);
  EXPECT_EQ(FetchedKeysHeader(2), 16);
  EXPECT_EQ(FetchedKeysHeader(3), 24);
}

}  // namespace
}  // namespace layoutmap
