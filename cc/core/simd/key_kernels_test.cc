#include "cc/core/simd/key_kernels.h"

#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "cc/core/simd/row_kernels.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

constexpr int64_t kEmpty = std::numeric_limits<int64_t>::min();

std::vector<const KeyKernels*> AllKernels() {
  std::vector<const KeyKernels*> kernels;
  for (CpuLevel level :
       {CpuLevel::kBaseline, CpuLevel::kAvx2, CpuLevel::kAvx512}) {
    if (CpuHas(level)) kernels.push_back(&KeyKernelsFor(level));
  }
  return kernels;
}

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
  const std::vector<const KeyKernels*> all = AllKernels();
  EXPECT_EQ(std::set<const KeyKernels*>(all.begin(), all.end()).size(),
            all.size());
}

TEST_F(KeyKernelsTest, FindReturnsKeysOnlyInTheBucketsOfTheirSearch) {
  std::vector<KeyPlace> places;
  std::vector<int64_t> expected;
  int64_t expected_probes = 0;
  for (uint32_t i = 0; i < 300; ++i) {
    const int64_t key = static_cast<int64_t>(random_() % 50) * 7 - 50;
    const auto bucket = static_cast<uint32_t>(kFirst + random_() % kSize);
    places.push_back({key, i, bucket});
    int64_t found = -1, looked_at = 0;
    for (int64_t row : RowsFrom(bucket)) {
      ++looked_at;
      if (keys_[row - 8 * kFirst] != key) continue;
      found = row;
      break;
    }
    expected.push_back(found);
    expected_probes += (looked_at + 7) / 8;
  }
  for (const KeyKernels* kernels : AllKernels()) {
    for (size_t size : {size_t{0}, size_t{1}, size_t{17}, places.size()}) {
      std::vector<int64_t> rows(size);
      const int64_t num_probes = kernels->find(
          Range(), places.data(), static_cast<int64_t>(size),
          static_cast<int64_t>(places.size() - size), rows.data());
      EXPECT_EQ(rows, std::vector<int64_t>(expected.begin(),
                                           expected.begin() + size));
      if (size == places.size()) {
        EXPECT_EQ(num_probes, expected_probes);
      }
    }
  }
}

TEST_F(KeyKernelsTest, FindFreeReturnsTheFirstEmptyLaneOrNone) {
  for (int64_t bucket = kFirst; bucket < kFirst + kSize; ++bucket) {
    int64_t expected = -1;
    for (int64_t row : RowsFrom(bucket)) {
      if (expected == -1 && keys_[row - 8 * kFirst] == kEmpty) expected = row;
    }
    for (const KeyKernels* kernels : AllKernels()) {
      EXPECT_EQ(kernels->find_free(Range(), bucket), expected);
    }
  }
  for (int64_t& key : keys_) key = key == kEmpty ? 1 : key;
  for (const KeyKernels* kernels : AllKernels()) {
    EXPECT_EQ(kernels->find_free(Range(), kFirst + 3), -1);
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
      for (const KeyKernels* kernels : AllKernels()) {
        EXPECT_EQ(kernels->find_least_recent(Range(), bucket, step), expected);
      }
    }
  }
}

TEST_F(KeyKernelsTest, BucketsAndDrawsAreEqualForAllLevels) {
  const KeyKernels& first = *AllKernels()[0];
  std::vector<int64_t> keys(37);
  for (int64_t& key : keys) key = static_cast<int64_t>(random_()) << 31;
  for (const KeyKernels* kernels : AllKernels()) {
    for (int64_t size : {0, 1, 8, 16, 37}) {
      std::vector<uint32_t> expected(size), found(size);
      EXPECT_FALSE(first.buckets(keys.data(), size, 1000, expected.data()));
      EXPECT_FALSE(kernels->buckets(keys.data(), size, 1000, found.data()));
      EXPECT_EQ(found, expected);
      for (uint32_t bucket : found) EXPECT_LT(bucket, 1000u);
      std::vector<float> drawn(size), values(size);
      first.draw({-0.1, 0.3, 77, size, drawn.data()});
      kernels->draw({-0.1, 0.3, 77, size, values.data()});
      EXPECT_EQ(values, drawn);
    }
    keys[20] = kEmpty;
    std::vector<uint32_t> found(37);
    EXPECT_TRUE(kernels->buckets(keys.data(), 37, 1000, found.data()));
    keys[20] = 4;
  }
}

}  // namespace
}  // namespace layoutmap
