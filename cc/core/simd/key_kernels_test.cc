#include "cc/core/simd/key_kernels.h"

#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "cc/core/simd/all_kernels_test.h"
#include "cc/core/simd/row_kernels.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

constexpr int64_t kEmpty = std::numeric_limits<int64_t>::min();

// The test data has five buckets, and the index of the first bucket is 10. Most
// lanes are in use, and there are few distinct steps.
class KeyKernelsTest : public testing::Test {
 protected:
  static constexpr int64_t kFirst = 10, kSize = 5, kProbes = 4;

  KeyKernelsTest()
      : keys_(8 * kSize), last_step_(8 * kSize), count_(8 * kSize) {
    for (size_t i = 0; i < keys_.size(); ++i) {
      keys_[i] = random_() % 9 == 0 ? kEmpty : static_cast<int64_t>(i * 7 - 50);
      last_step_[i] = static_cast<int32_t>(3 + random_() % 4);
    }
  }

  BucketRange Range() {
    return {keys_.data(), last_step_.data(), count_.data(), kFirst, kSize,
            kProbes};
  }

  // Returns the rows that a search visits if it starts in `bucket`. The rows
  // are in the order of the search.
  static std::vector<int64_t> RowsFrom(int64_t bucket) {
    std::vector<int64_t> rows;
    for (int64_t p = 0; p < kProbes; ++p) {
      const int64_t one = kFirst + (bucket - kFirst + p) % kSize;
      for (int64_t lane = 0; lane < 8; ++lane) rows.push_back(8 * one + lane);
    }
    return rows;
  }

  std::mt19937 random_{5};
  std::vector<int64_t> keys_;
  std::vector<int32_t> last_step_, count_;
};

TEST_F(KeyKernelsTest, EachLevelHasSeparateKernels) {
  const std::vector<NamedKernels> all = AllKernels();
  std::set<const KeyKernels*> kernels;
  for (const NamedKernels& one : all) kernels.insert(&one.keys);
  EXPECT_EQ(kernels.size(), all.size());
}

TEST_F(KeyKernelsTest, FindReturnsKeysOnlyInTheBucketsOfTheirSearch) {
  std::vector<KeyPlace> places;
  std::vector<uint32_t> expected;
  // Index and whether a visited bucket has an empty lane.
  std::vector<std::pair<uint32_t, uint32_t>> expected_missed;
  int64_t expected_probes = 0;
  for (uint32_t i = 0; i < 300; ++i) {
    const int64_t key = static_cast<int64_t>(random_() % 50) * 7 - 50;
    const auto bucket = static_cast<uint32_t>(kFirst + random_() % kSize);
    places.push_back({key, i, bucket});
    uint32_t found = kNoRelativeRow, has_space = 0;
    int64_t looked_at = 0;
    for (int64_t row : RowsFrom(bucket)) {
      const int64_t relative = row - 8 * kFirst;
      ++looked_at;
      has_space |= keys_[relative] == kEmpty;
      if (keys_[relative] != key) continue;
      found = static_cast<uint32_t>(relative);
      break;
    }
    expected.push_back(found);
    expected_probes += (looked_at + 7) / 8;
    if (found == kNoRelativeRow) expected_missed.push_back({i, has_space});
  }
  for (const NamedKernels& kernels : AllKernels()) {
    for (size_t size : {size_t{0}, size_t{1}, size_t{17}, places.size()}) {
      std::vector<uint32_t> rows(size);
      std::vector<MissedKey> missed(size);
      int64_t num_probes = 1000;
      missed.resize(kernels.keys.find(Range(), places.data(),
                                      static_cast<int64_t>(size), rows.data(),
                                      missed.data(), &num_probes));
      EXPECT_EQ(rows, std::vector<uint32_t>(expected.begin(),
                                            expected.begin() + size));
      size_t num_missed = 0;
      for (const auto& [index, has_space] : expected_missed) {
        if (index >= size) break;
        ASSERT_LT(num_missed, missed.size());
        EXPECT_EQ(missed[num_missed].index, index);
        EXPECT_EQ(missed[num_missed++].may_have_space, has_space);
      }
      EXPECT_EQ(missed.size(), num_missed);
      if (size == places.size()) {
        EXPECT_EQ(num_probes, 1000 + expected_probes);
      }
    }
  }
}

// The keys of two segments are at different addresses. Most keys of the
// segments are in the batch.
TEST_F(KeyKernelsTest, SearchReturnsTheRowsOfKeysInAllSegments) {
  for (int64_t num_probes : {int64_t{1}, kProbes}) {
    std::vector<int64_t> keys;
    for (int64_t i = 0; i < 200; ++i) {
      keys.push_back(static_cast<int64_t>(random_() % 60) * 7 - 50);
    }
    const std::vector<int64_t> empty(8 * kSize, kEmpty);
    std::vector<std::vector<int64_t>> lanes(2, empty);
    std::vector<uint32_t> buckets(keys.size());
    std::vector<uint8_t> expected_segments(keys.size());
    KeyKernelsFor(CpuLevel::kBaseline)
        .buckets({keys.data(), static_cast<int64_t>(keys.size()), 2 * kSize, 2,
                  buckets.data(), expected_segments.data()});
    // Every third key has no row. The buckets of the other keys are filled in
    // the order of the batch. Segment 1 has no empty lane.
    const auto visit = [&](size_t i, const auto& use) {
      const int64_t first = buckets[i] % kSize;
      for (int64_t p = 0; p < num_probes; ++p) {
        for (int64_t lane = 0; lane < 8; ++lane) {
          const int64_t row = (first + p) % kSize * 8 + lane;
          if (use(p, row, &lanes[expected_segments[i]][row])) return;
        }
      }
    };
    for (size_t i = 0; i < keys.size(); ++i) {
      if (keys[i] % 3 == 0) continue;
      visit(i, [&](int64_t, int64_t, int64_t* lane) {
        if (*lane != kEmpty && *lane != keys[i]) return false;
        *lane = keys[i];
        return true;
      });
    }
    for (int64_t& key : lanes[1]) key = key == kEmpty ? 1000000 : key;
    std::vector<uint32_t> expected(keys.size());
    for (const NamedKernels& kernels : AllKernels()) {
      for (size_t size :
           {size_t{0}, size_t{1}, size_t{64}, size_t{65}, keys.size()}) {
        int64_t num_visits = 0;
        std::vector<uint32_t> counts = {10, 20}, expected_counts = counts;
        for (size_t i = 0; i < size; ++i) {
          ++expected_counts[expected_segments[i]];
          expected[i] = kNoRelativeRow;
          int64_t last = num_probes;
          visit(i, [&](int64_t p, int64_t row, int64_t* lane) {
            if (*lane == kEmpty) expected[i] = kNoRowButSpace;
            if (*lane != keys[i]) return false;
            expected[i] = static_cast<uint32_t>(row);
            last = p + 1;
            return true;
          });
          num_visits += last;
        }
        std::vector<uint8_t> segments(size);
        std::vector<uint32_t> rows(size);
        const int64_t* const first_lanes[] = {lanes[0].data(), lanes[1].data()};
        SearchArgs args = {keys.data(),
                           static_cast<int64_t>(size),
                           2,
                           kSize,
                           num_probes,
                           first_lanes,
                           segments.data(),
                           rows.data(),
                           counts.data()};
        const SearchResult result = kernels.keys.search(args);
        EXPECT_FALSE(result.has_empty_key);
        EXPECT_EQ(result.num_probes, num_visits);
        EXPECT_EQ(counts, expected_counts);
        for (size_t i = 0; i < size; ++i) {
          EXPECT_EQ(rows[i], expected[i]);
          EXPECT_EQ(segments[i], expected_segments[i]);
        }
      }
      std::vector<int64_t> bad = keys;
      bad[70] = kEmpty;
      std::vector<uint8_t> segments(bad.size());
      std::vector<uint32_t> rows(bad.size()), counts(2);
      const int64_t* const first_lanes[] = {lanes[0].data(), lanes[1].data()};
      EXPECT_TRUE(kernels.keys
                      .search({bad.data(), static_cast<int64_t>(bad.size()), 2,
                               kSize, num_probes, first_lanes, segments.data(),
                               rows.data(), counts.data()})
                      .has_empty_key);
    }
  }
}

TEST_F(KeyKernelsTest, GroupReturnsTheRowsInAscendingOrder) {
  constexpr int64_t kNumRows = 150;
  constexpr uint32_t kFirstRow = 1000;
  for (int64_t size : {0, 1, 5, 400}) {
    std::vector<uint64_t> uses, used((kNumRows + 63) / 64);
    std::map<uint32_t, std::vector<uint32_t>> expected;
    for (uint32_t i = 0; i < size; ++i) {
      // Row 149 is the last row. Row 64 is the first row of a word.
      const uint32_t row = i == 2 ? 149 : i == 3 ? 64 : random_() % kNumRows;
      uses.push_back(uint64_t{row} << 32 | 3 * i);
      used[row / 64] |= uint64_t{1} << row % 64;
      expected[kFirstRow + row].push_back(3 * i);
    }
    for (const NamedKernels& kernels : AllKernels()) {
      std::vector<uint64_t> scratch = uses;
      std::vector<uint32_t> ranks(used.size()), next(size);
      std::vector<uint32_t> rows(size), starts(size), positions(size);
      const int64_t num_rows = kernels.keys.group(
          {scratch.data(), size, kFirstRow, used.data(),
           static_cast<int64_t>(used.size()), ranks.data(), next.data(),
           rows.data(), starts.data(), positions.data()});
      std::map<uint32_t, std::vector<uint32_t>> found;
      for (int64_t u = 0; u < num_rows; ++u) {
        if (u > 0) {
          EXPECT_GT(rows[u], rows[u - 1]);
        }
        const int64_t end = u + 1 < num_rows ? starts[u + 1] : size;
        found[rows[u]] = {positions.begin() + starts[u],
                          positions.begin() + end};
      }
      EXPECT_EQ(found, expected);
    }
  }
}

TEST_F(KeyKernelsTest, FindFreeReturnsTheFirstEmptyLaneOrNone) {
  for (int64_t bucket = kFirst; bucket < kFirst + kSize; ++bucket) {
    int64_t expected = -1;
    for (int64_t row : RowsFrom(bucket)) {
      if (expected == -1 && keys_[row - 8 * kFirst] == kEmpty) expected = row;
    }
    for (const NamedKernels& kernels : AllKernels()) {
      EXPECT_EQ(kernels.keys.find_free(Range(), bucket), expected);
    }
  }
  for (int64_t& key : keys_) key = key == kEmpty ? 1 : key;
  for (const NamedKernels& kernels : AllKernels()) {
    EXPECT_EQ(kernels.keys.find_free(Range(), kFirst + 3), -1);
  }
}

TEST_F(KeyKernelsTest, FindLeastRecentReturnsTheFirstRowOfTheLowestStep) {
  for (int32_t step = 2; step < 8; ++step) {
    for (int64_t bucket = kFirst; bucket < kFirst + kSize; ++bucket) {
      int64_t expected = -1;
      for (int64_t row : RowsFrom(bucket)) {
        const int32_t here = last_step_[row - 8 * kFirst];
        if (here >= step) continue;
        const int32_t best =
            expected == -1 ? step : last_step_[expected - 8 * kFirst];
        if (here < best || (here == best && row < expected)) expected = row;
      }
      for (const NamedKernels& kernels : AllKernels()) {
        EXPECT_EQ(kernels.keys.find_least_recent(Range(), bucket, step),
                  expected);
      }
    }
  }
}

TEST_F(KeyKernelsTest, BucketsAndDrawsAreEqualForAllLevels) {
  // 16 segments of 63 buckets.
  constexpr int64_t kNumBuckets = 1008, kNumSegments = 16;
  const KeyKernels& first = AllKernels()[0].keys;
  std::vector<int64_t> keys(37);
  for (int64_t& key : keys) key = static_cast<int64_t>(random_()) << 31;
  const auto find_buckets = [&](const KeyKernels& kernels, int64_t size,
                                std::vector<uint32_t>* buckets,
                                std::vector<uint8_t>* segments) {
    buckets->resize(size);
    segments->resize(size);
    return kernels.buckets({keys.data(), size, kNumBuckets, kNumSegments,
                            buckets->data(), segments->data()});
  };
  std::vector<uint32_t> expected, found;
  std::vector<uint8_t> segments;
  for (const NamedKernels& kernels : AllKernels()) {
    for (int64_t size : {0, 1, 8, 16, 37}) {
      EXPECT_FALSE(find_buckets(first, size, &expected, &segments));
      EXPECT_FALSE(find_buckets(kernels.keys, size, &found, &segments));
      EXPECT_EQ(found, expected);
      for (int64_t i = 0; i < size; ++i) {
        EXPECT_LT(found[i], kNumBuckets);
        EXPECT_EQ(segments[i], found[i] / 63);
      }
      std::vector<float> drawn(size), values(size);
      first.draw({-0.1, 0.3, 77, size, drawn.data()});
      kernels.keys.draw({-0.1, 0.3, 77, size, values.data()});
      EXPECT_EQ(values, drawn);
    }
    keys[20] = kEmpty;
    EXPECT_TRUE(find_buckets(kernels.keys, 37, &found, &segments));
    keys[20] = 4;
  }
}

}  // namespace
}  // namespace layoutmap
