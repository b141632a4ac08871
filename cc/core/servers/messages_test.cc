#include "cc/core/servers/messages.h"

#include <cstdint>
#include <string>
#include <vector>

#include "cc/core/base/views.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

TEST(MessagesTest, AHeaderIsReadAsItWasWritten) {
  ApplyHeader written;
  written.token = {3, INT64_MAX, -5};
  written.num_updates = int64_t{1} << 40;
  std::vector<uint32_t> words;
  WriteHeader(written, &words);
  words.push_back(7);
  ApplyHeader header;
  Span<const uint32_t> rest;
  ASSERT_TRUE(ReadHeader(words, &header, &rest).ok());
  EXPECT_EQ(header.token.epoch, 3);
  EXPECT_EQ(header.token.number, INT64_MAX);
  EXPECT_EQ(header.token.attempt, -5);
  EXPECT_EQ(header.num_updates, int64_t{1} << 40);
  ASSERT_EQ(rest.size(), 1);
  EXPECT_EQ(rest[0], 7u);
  words.resize(ApplyHeader::kNumWords - 1);
  EXPECT_FALSE(ReadHeader(words, &header, &rest).ok());
}

TEST(MessagesTest, ANumberOfUpdatesTravelsInTwoFloats) {
  float header[kFetchedHeader];
  for (const int64_t count : {int64_t{0}, int64_t{0x7fc00001ffc00001}}) {
    WriteNumUpdates(count, header);
    EXPECT_EQ(ReadNumUpdates(header), count);
  }
}

class RowsTest : public testing::Test {
 protected:
  std::string Refusal(const std::vector<uint32_t>& words) {
    words_ = words;
    return ReadRows(words_, sizes_, &rows_).message();
  }

  std::vector<uint32_t> words_;  // What `rows_` are views of.
  std::vector<PieceSize> sizes_ = {{"ads", 3}, {"ads", 0}, {"words", 2}};
  std::vector<Span<const uint32_t>> rows_;
};

TEST_F(RowsTest, RowsComePieceByPiece) {
  ASSERT_EQ(Refusal({2, 0, 1, 0, 2, 1}), "");
  ASSERT_EQ(rows_.size(), 3u);
  EXPECT_EQ(rows_[0].size(), 2);
  EXPECT_EQ(rows_[0][1], 2u);
  EXPECT_TRUE(rows_[1].empty());
  EXPECT_EQ(rows_[2][0], 1u);
  EXPECT_EQ(Refusal({0, 0, 0}), "");
}

TEST_F(RowsTest, WhatDoesNotFitIsRefusedWithItsTable) {
  EXPECT_NE(Refusal({1, 0}).find("too few"), std::string::npos);
  EXPECT_NE(Refusal({}).find("too few"), std::string::npos);
  EXPECT_NE(Refusal({0, 0, 2, 1}).find("'words'"), std::string::npos);
  EXPECT_NE(Refusal({UINT32_MAX, 0, 0}).find("'ads'"), std::string::npos);
  EXPECT_NE(Refusal({0, 0, 1, 1, 1}).find("must have 4 words"),
            std::string::npos);
  EXPECT_NE(Refusal({1, 0, 0, 3}).find("below 3"), std::string::npos);
  EXPECT_NE(Refusal({0, 1, 0, 0}).find("below 0"), std::string::npos);
}

}  // namespace
}  // namespace layoutmap
