#include "cc/core/keys/sketch.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/keys/bucket_layout.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

// The sketch for the first segment of a vocabulary.
class Sketch {
 public:
  explicit Sketch(int64_t capacity) {
    int64_t num_buckets = 0;
    BucketLayout layout;
    EXPECT_TRUE(BucketLayout::NumBucketsFor(capacity, &num_buckets).ok());
    EXPECT_TRUE(BucketLayout::Make(num_buckets, &layout).ok());
    cells_.resize(2 * SegmentSketch::NumCells(layout));
  }

  int32_t Add(int64_t key, int64_t times = 1) {
    return SegmentSketch({cells_.data(), static_cast<int64_t>(cells_.size())},
                         &seen_)
        .Add(key, times);
  }

  int64_t window() const { return static_cast<int64_t>(cells_.size()) / 4; }

 private:
  std::vector<uint8_t> cells_;
  int64_t seen_ = 0;
};

TEST(SketchTest, TheWindowIsAtLeastTheRowsOfASegment) {
  EXPECT_EQ(Sketch(8).window(), 128);
  EXPECT_EQ(Sketch(2000).window(), 128);  // There are 64 segments of 32 rows.
  // There are 64 segments of 1,000 rows.
  EXPECT_EQ(Sketch(64000).window(), 1000);
}

// Keys have different frequencies. The test adds one or several uses of a key
// per call.
TEST(SketchTest, CountsAreNotBelowTheirLowerBound) {
  std::mt19937_64 random(1);
  for (const int64_t capacity : {8, 500, 64000}) {
    Sketch sketch(capacity);
    struct Seen {
      int64_t times = 0;
      // Number of ids that the sketch counted before the first use of the key.
      int64_t first = 0;
    };
    std::map<int64_t, Seen> seen;
    int64_t num_ids = 0;
    for (int64_t i = 0; i < 30 * sketch.window(); ++i) {
      // Keys with small values are frequent.
      const int64_t key = int64_t{1} << (random() % 16);
      const int64_t drawn = static_cast<int64_t>(random() % key);
      const int64_t times = random() % 8 == 0 ? 1 + random() % 20 : 1;
      const auto found = seen.try_emplace(drawn, Seen{0, num_ids}).first;
      Seen& one = found->second;
      one.times += times;
      num_ids += times;
      const int32_t count = sketch.Add(drawn, times);
      const int64_t passed = num_ids - one.first;
      const int64_t lost = (passed + sketch.window() - 1) / sketch.window();
      ASSERT_GE(count, std::min<int64_t>(one.times, 255) - lost)
          << capacity << " " << i;
      // A cell with the value 255 does not count further uses, so the test
      // starts a new count for this key.
      if (count == 255) seen.erase(found);
    }
  }
}

TEST(SketchTest, AtMostOneCountIsLostWithinAWindow) {
  // The test is repeated for each start position in the window.
  for (int64_t before = 0; before < 128; ++before) {
    Sketch sketch(8);
    for (int64_t i = 0; i < before; ++i) sketch.Add(1'000'000 + i);
    int32_t count = 0;
    for (int64_t i = 0; i < 100; ++i) count = sketch.Add(7);
    EXPECT_GE(count, 99) << before;
  }
}

TEST(SketchTest, KeysThatAreSeenInEachWindowReachAnyCount) {
  for (const int64_t capacity : {8, 100, 2000}) {
    Sketch sketch(capacity);
    std::vector<int32_t> highest(10);
    for (int64_t i = 0; i < 400; ++i) {
      for (int64_t key = 0; key < 10; ++key) {
        highest[key] = std::max(highest[key], sketch.Add(key));
        // After each of the ten keys, the loop adds another key that occurs
        // only once.
        sketch.Add(1'000'000 + 10 * i + key);
      }
    }
    // The outer loop adds 20 ids per iteration. With a window of 128 ids, each
    // count is decremented every 6.4 iterations.
    EXPECT_EQ(*std::min_element(highest.begin(), highest.end()), 255)
        << capacity;
  }
}

TEST(SketchTest, FewerThanOneInTenKeysSeenOnceCountTwice) {
  for (const int64_t capacity : {8, 64000}) {
    Sketch sketch(capacity);
    const int64_t num_keys = 50 * sketch.window();
    int64_t num_twice = 0, num_more = 0;
    for (int64_t key = 0; key < num_keys; ++key) {
      const int32_t count = sketch.Add(key);
      num_twice += count >= 2;
      num_more += count >= 3;
    }
    EXPECT_LT(num_twice, num_keys / 10);
    EXPECT_LT(num_more, num_keys / 500);
  }
}

TEST(SketchTest, CountsAreAtMost255) {
  Sketch sketch(8);
  EXPECT_EQ(sketch.Add(5, 1000), 255);
  // After 255 ids, one window of 128 ids is complete, and the second window is
  // not.
  EXPECT_EQ(sketch.Add(5, 0), 254);
  EXPECT_EQ(sketch.Add(5, 1), 255);
}

}  // namespace
}  // namespace layoutmap
