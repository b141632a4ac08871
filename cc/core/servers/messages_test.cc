#include "cc/core/servers/messages.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cc/core/base/row_type.h"
#include "cc/core/base/views.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

const std::vector<PieceSize> kSizes = {
    {"ads", 3, 2, 1}, {"ads", 0, 2, 1}, {"words", 2, 4, 0}};

std::vector<uint8_t> Fetch(const std::vector<uint32_t>& counts,
                           const std::vector<uint8_t>& rows,
                           uint32_t type = 0) {
  std::vector<uint8_t> bytes(CountsBytes(counts.size()));
  WriteCounts(static_cast<RowType>(type), counts, bytes.data());
  bytes.insert(bytes.end(), rows.begin(), rows.end());
  return bytes;
}

std::string ErrorMessage(const std::vector<uint8_t>& bytes) {
  FetchMessage message;
  return message.Read(bytes, kSizes).message();
}

TEST(MessagesTest, RowsAreReadByPiece) {
  FetchMessage message;
  const auto bytes = Fetch({2, 0, 1}, {0, 2, 1}, 1);
  ASSERT_EQ(message.Read(bytes, kSizes).message(), "");
  EXPECT_EQ(message.wire, RowType::kBfloat16);
  EXPECT_EQ(message.rows,
            (std::vector<std::vector<uint32_t>>{{0, 2}, {}, {1}}));
  EXPECT_EQ(ErrorMessage(Fetch({0, 0, 0}, {})), "");
}

TEST(MessagesTest, MismatchesAreRejectedWithTheTableName) {
  const auto has = [](const std::string& text, const std::string& words) {
    return text.find(words) != std::string::npos;
  };
  EXPECT_TRUE(has(ErrorMessage({}), "too few"));
  EXPECT_TRUE(has(ErrorMessage(Fetch({1, 0}, {})), "too few"));
  EXPECT_TRUE(has(ErrorMessage(Fetch({0, 0, 2}, {1})), "'words'"));
  EXPECT_TRUE(has(ErrorMessage(Fetch({UINT32_MAX, 0, 0}, {})), "'ads'"));
  EXPECT_TRUE(has(ErrorMessage(Fetch({0, 0, 1}, {1, 1})), "1 bytes more"));
  EXPECT_TRUE(has(ErrorMessage(Fetch({2, 0, 0}, {1, 2})), "below 3"));
  EXPECT_TRUE(has(ErrorMessage(Fetch({0, 1, 0}, {0})), "below 0"));
  EXPECT_TRUE(has(ErrorMessage(Fetch({0, 0, 0}, {}, 2)), "type 2"));
}

class ApplyTest : public testing::TestWithParam<RowType> {
 protected:
  std::vector<uint8_t> Write() {
    ApplyWriter writer;
    writer.header.token = {3, INT64_MAX, -5};
    writer.header.num_updates = int64_t{1} << 40;
    writer.wire = GetParam();
    writer.counts = {1, 0, 1};
    writer.hyperparameters = {0.5f, 0.25f};
    writer.num_values = 6;
    writer.rows = {2, 1};
    std::vector<uint8_t> bytes(writer.size());
    uint8_t* const gradients = writer.Write(bytes.data());
    const std::vector<float> floats = {1, 2, 3, 4, 5, 6};
    const std::vector<uint16_t> halves = {1, 2, 3, 4, 5, 6};
    if (GetParam() == RowType::kFloat32) {
      std::memcpy(gradients, floats.data(), 24);
    } else {
      std::memcpy(gradients, halves.data(), 12);
    }
    return bytes;
  }
};

TEST_P(ApplyTest, WrittenMessagesCanBeRead) {
  const std::vector<uint8_t> bytes = Write();
  ApplyMessage message;
  ASSERT_EQ(message.Read(bytes, kSizes).message(), "");
  EXPECT_EQ(message.header.token.epoch, 3);
  EXPECT_EQ(message.header.token.number, INT64_MAX);
  EXPECT_EQ(message.header.token.attempt, -5);
  EXPECT_EQ(message.header.num_updates, int64_t{1} << 40);
  EXPECT_EQ(message.wire, GetParam());
  EXPECT_EQ(message.rows, (std::vector<std::vector<uint32_t>>{{2}, {}, {1}}));
  EXPECT_EQ(message.hyperparameters[0][0], 0.5f);
  EXPECT_EQ(message.hyperparameters[1][0], 0.25f);
  EXPECT_TRUE(message.hyperparameters[2].empty());
  if (GetParam() == RowType::kFloat32) {
    ASSERT_EQ(message.gradients.size(), 6);
    EXPECT_EQ(message.gradients[5], 6.0f);
  } else {
    ASSERT_EQ(message.half_gradients.size(), 6);
    EXPECT_EQ(message.half_gradients[5], 6);
  }
}

TEST_P(ApplyTest, EveryTruncatedMessageIsRejected) {
  std::vector<uint8_t> bytes = Write();
  while (!bytes.empty()) {
    bytes.pop_back();
    ApplyMessage message;
    EXPECT_FALSE(message.Read(bytes, kSizes).ok()) << bytes.size();
  }
}

// If a message has no rows, `Read` can detect missing hyperparameters only from
// the size of the message.
TEST_P(ApplyTest, AMessageWithoutRowsContainsHyperparameters) {
  ApplyWriter writer;
  writer.wire = GetParam();
  writer.counts = {0, 0, 0};
  writer.hyperparameters = {0.5f, 0.25f};
  std::vector<uint8_t> bytes(writer.size());
  writer.Write(bytes.data());
  ApplyMessage message;
  ASSERT_EQ(message.Read(bytes, kSizes).message(), "");
  while (!bytes.empty()) {
    bytes.pop_back();
    EXPECT_FALSE(message.Read(bytes, kSizes).ok()) << bytes.size();
  }
}

INSTANTIATE_TEST_SUITE_P(Wires, ApplyTest,
                         testing::Values(RowType::kFloat32,
                                         RowType::kBfloat16));

TEST(MessagesTest, HugeNumbersOfRowsAreRejected) {
  std::vector<uint8_t> bytes(ApplyHeader::kNumBytes);
  const auto counts = Fetch({UINT32_MAX, UINT32_MAX, UINT32_MAX}, {1, 2, 3});
  bytes.insert(bytes.end(), counts.begin(), counts.end());
  std::vector<PieceSize> sizes = kSizes;
  for (PieceSize& size : sizes) size.dim = INT64_MAX;
  ApplyMessage message;
  EXPECT_FALSE(message.Read(bytes, sizes).ok());
}

std::vector<uint8_t> Join(const std::vector<uint8_t>& apply,
                          const std::vector<uint8_t>& fetch) {
  // The value shows bytes that are not written.
  std::vector<uint8_t> bytes(JoinedBytes(apply.size(), fetch.size()), 77);
  std::copy(apply.begin(), apply.end(),
            WriteJoined(apply.size(), fetch, bytes.data()));
  return bytes;
}

TEST(MessagesTest, JoinedMessagesAreReadAsWritten) {
  for (int size = 0; size < 20; ++size) {
    const std::vector<uint8_t> apply(size, 1), fetch(20 - size, 2);
    const std::vector<uint8_t> bytes = Join(apply, fetch);
    EXPECT_EQ(std::count(bytes.begin(), bytes.end(), 77), 0);
    JoinedMessage message;
    ASSERT_EQ(message.Read(bytes).message(), "");
    EXPECT_EQ(std::vector<uint8_t>(message.apply.begin(), message.apply.end()),
              apply);
    EXPECT_EQ(std::vector<uint8_t>(message.fetch.begin(), message.fetch.end()),
              fetch);
    const auto address = reinterpret_cast<uintptr_t>(bytes.data());
    const auto part = [&](Span<const uint8_t> span) {
      return reinterpret_cast<uintptr_t>(span.data()) - address;
    };
    EXPECT_EQ(part(message.apply) % 8, 0);
    EXPECT_EQ(part(message.fetch) % 8, 0);
  }
}

TEST(MessagesTest, JoinedMessagesWithWrongSizesAreRejected) {
  std::vector<uint8_t> bytes = Join({1, 2, 3}, {});
  JoinedMessage message;
  ASSERT_EQ(message.Read(bytes).message(), "");
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(message.Read({bytes.data(), static_cast<int64_t>(size)}).ok())
        << size;
  }
  for (const int64_t size : {int64_t{-1}, int64_t{9}, INT64_MAX, INT64_MIN}) {
    std::memcpy(bytes.data(), &size, sizeof(size));
    EXPECT_FALSE(message.Read(bytes).ok()) << size;
  }
}

std::vector<uint8_t> Bundle(const std::vector<std::vector<uint8_t>>& parts) {
  const std::vector<Span<const uint8_t>> messages(parts.begin(), parts.end());
  std::vector<uint8_t> bytes(BundleBytes(messages), 77);
  WriteBundle(messages, bytes.data());
  return bytes;
}

TEST(MessagesTest, BundlesAreReadAsWritten) {
  for (int count = 1; count < 5; ++count) {
    for (int first = 0; first < 20; ++first) {
      std::vector<std::vector<uint8_t>> parts;
      for (int i = 0; i < count; ++i) parts.emplace_back(first + 3 * i, i + 1);
      const std::vector<uint8_t> bytes = Bundle(parts);
      EXPECT_EQ(std::count(bytes.begin(), bytes.end(), 77), 0);
      std::vector<Span<const uint8_t>> found;
      ASSERT_EQ(ReadBundle(bytes, count, &found).message(), "");
      ASSERT_EQ(found.size(), parts.size());
      for (int i = 0; i < count; ++i) {
        EXPECT_EQ(std::vector<uint8_t>(found[i].begin(), found[i].end()),
                  parts[i]);
        EXPECT_EQ((found[i].data() - bytes.data()) % 8, 0);
      }
      EXPECT_FALSE(ReadBundle(bytes, count + 1, &found).ok());
      EXPECT_FALSE(ReadBundle(bytes, count - 1, &found).ok());
    }
  }
}

TEST(MessagesTest, BundlesWithWrongSizesAreRejected) {
  std::vector<uint8_t> bytes = Bundle({{1, 2, 3}, {}, {4}});
  std::vector<Span<const uint8_t>> found;
  ASSERT_EQ(ReadBundle(bytes, 3, &found).message(), "");
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(
        ReadBundle({bytes.data(), static_cast<int64_t>(size)}, 3, &found).ok())
        << size;
  }
  for (int place = 0; place < 3; ++place) {
    std::vector<uint8_t> changed = bytes;
    for (const int64_t size :
         {int64_t{-1}, int64_t{17}, INT64_MAX, INT64_MIN}) {
      std::memcpy(changed.data() + 8 * place, &size, sizeof(size));
      EXPECT_FALSE(ReadBundle(changed, 3, &found).ok()) << size;
    }
  }
}

TEST(MessagesTest, TheNumberOfUpdatesIsReadAsWritten) {
  uint8_t header[kFetchedHeader];
  for (const int64_t count : {int64_t{0}, int64_t{0x7fc00001ffc00001}}) {
    WriteNumUpdates(count, header);
    EXPECT_EQ(ReadNumUpdates(header), count);
  }
}

}  // namespace
}  // namespace layoutmap
