#include "cc/core/rows/unique_rows.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/parallel_for_test.h"
#include "cc/core/base/views.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

using Segments = std::vector<std::vector<uint32_t>>;

UniqueRows Find(const Segments& segments, int64_t num_rows,
                const ParallelFor& parallel_for = SerialFor,
                Span<const uint32_t> labels = {}) {
  std::vector<Span<const uint32_t>> spans(segments.begin(), segments.end());
  return FindUniqueRows(spans, num_rows, parallel_for, labels);
}

void ExpectMatchesMap(const Segments& segments, int64_t num_rows) {
  std::map<uint32_t, std::vector<uint32_t>> positions_of;
  uint32_t position = 0;
  for (const std::vector<uint32_t>& segment : segments) {
    for (uint32_t row : segment) positions_of[row].push_back(position++);
  }
  const UniqueRows unique = Find(segments, num_rows);
  ASSERT_EQ(unique.size(), static_cast<int64_t>(positions_of.size()));
  ASSERT_EQ(unique.splits.size(), unique.rows.size() + 1);
  ASSERT_EQ(unique.splits[0], 0);
  ASSERT_EQ(unique.positions.size(), position);
  int64_t u = 0;
  for (const auto& [row, positions] : positions_of) {
    ASSERT_EQ(unique.rows[u], row);
    const std::vector<uint32_t> found(
        unique.positions.begin() + unique.splits[u],
        unique.positions.begin() + unique.splits[u + 1]);
    ASSERT_EQ(found, positions) << "row " << row;
    ++u;
  }
}

std::vector<uint32_t> RandomRows(int64_t num_ids, int64_t num_rows,
                                 std::mt19937_64* random) {
  std::vector<uint32_t> rows(num_ids);
  for (uint32_t& row : rows) row = (*random)() % num_rows;
  return rows;
}

// The parameters are numbers of rows at which the radix sort changes the number
// or the width of its digits.
class DigitBorderTest : public ::testing::TestWithParam<int64_t> {};

TEST_P(DigitBorderTest, MatchesAMap) {
  const int64_t num_rows = GetParam();
  std::mt19937_64 random(num_rows);
  for (int64_t num_ids : {0, 1, 2, 3, 17, 255, 256, 257, 1000, 5000}) {
    ExpectMatchesMap({RandomRows(num_ids, num_rows, &random)}, num_rows);
    // A few rows have many ids. The first row and the last row are among them.
    std::vector<uint32_t> skewed(num_ids);
    for (uint32_t& row : skewed) {
      row = random() % 3 ? num_rows - 1
                         : random() % std::min<int64_t>(num_rows, 4);
    }
    ExpectMatchesMap({skewed}, num_rows);
  }
}

TEST_P(DigitBorderTest, NumbersPositionsAcrossSegments) {
  const int64_t num_rows = GetParam();
  std::mt19937_64 random(num_rows + 1);
  for (int round = 0; round < 20; ++round) {
    Segments segments(random() % 6);
    for (std::vector<uint32_t>& segment : segments) {
      segment =
          RandomRows(random() % 40, std::min<int64_t>(num_rows, 50), &random);
    }
    ExpectMatchesMap(segments, num_rows);
  }
}

TEST_P(DigitBorderTest, KeepsTheOrderOfSortedAndReversedIds) {
  const int64_t num_rows = GetParam();
  std::vector<uint32_t> rows;
  for (int64_t i = 0; i < 3000; ++i) {
    rows.push_back(num_rows - 1 - std::min(num_rows - 1, i / 2));
  }
  ExpectMatchesMap({rows}, num_rows);
  ExpectMatchesMap({{rows.rbegin(), rows.rend()}}, num_rows);
}

INSTANTIATE_TEST_SUITE_P(
    NumRows, DigitBorderTest,
    ::testing::Values(int64_t{1}, int64_t{2}, int64_t{3}, int64_t{255},
                      int64_t{256}, int64_t{257}, int64_t{2047}, int64_t{2048},
                      int64_t{2049}, int64_t{1} << 16, (int64_t{1} << 16) + 1,
                      int64_t{1} << 21, (int64_t{1} << 22) - 1,
                      int64_t{1} << 22, (int64_t{1} << 22) + 1,
                      (int64_t{1} << 31) + 1, (int64_t{1} << 32) - 1,
                      int64_t{1} << 32));

TEST(UniqueRowsTest, EmptyInputHasNoRows) {
  for (const Segments& none : {Segments{}, Segments{{}}, Segments{{}, {}}}) {
    const UniqueRows unique = Find(none, 0);
    EXPECT_EQ(unique.size(), 0);
    EXPECT_EQ(unique.splits, std::vector<int64_t>{0});
    EXPECT_TRUE(unique.positions.empty());
  }
}

TEST(UniqueRowsTest, ManyIdsMatchAMap) {
  std::mt19937_64 random(7);
  ExpectMatchesMap({RandomRows(200000, 50000, &random),
                    RandomRows(100000, 2000000, &random)},
                   2000000);
}

TEST(UniqueRowsTest, ResultsDoNotDependOnTheNumberOfThreads) {
  std::mt19937_64 random(11);
  // The test uses numbers of ids below and above kManyIds, the minimum for
  // which all threads share the sort.
  for (int64_t num_ids : {kManyIds - 1, kManyIds, kManyIds + 13}) {
    for (int64_t num_rows : {int64_t{1}, int64_t{3000}, int64_t{1} << 32}) {
      const Segments segments = {
          RandomRows(num_ids / 3, num_rows, &random),
          {},
          RandomRows(num_ids - num_ids / 3, std::min<int64_t>(num_rows, 7),
                     &random)};
      const UniqueRows expected = Find(segments, num_rows);
      for (const ParallelFor& parallel_for : {UnevenFor(5), UnevenFor(2, 1)}) {
        const UniqueRows found = Find(segments, num_rows, parallel_for);
        EXPECT_EQ(found.rows, expected.rows);
        EXPECT_EQ(found.splits, expected.splits);
        EXPECT_EQ(found.positions, expected.positions);
      }
    }
  }
}

TEST(UniqueRowsTest, LabelsReplacePositions) {
  std::mt19937_64 random(12);
  for (int64_t num_ids : {int64_t{0}, int64_t{500}, kManyIds + 1}) {
    const Segments segments = {RandomRows(num_ids, 200, &random)};
    std::vector<uint32_t> labels(num_ids);
    for (uint32_t& label : labels) label = static_cast<uint32_t>(random());
    const UniqueRows expected = Find(segments, 200);
    const UniqueRows found = Find(segments, 200, UnevenFor(3), labels);
    EXPECT_EQ(found.rows, expected.rows);
    EXPECT_EQ(found.splits, expected.splits);
    ASSERT_EQ(found.positions.size(), expected.positions.size());
    for (size_t k = 0; k < expected.positions.size(); ++k) {
      ASSERT_EQ(found.positions[k], labels[expected.positions[k]]);
    }
  }
}

}  // namespace
}  // namespace layoutmap
