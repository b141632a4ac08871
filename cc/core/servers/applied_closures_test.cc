#include "cc/core/servers/applied_closures.h"

#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace layoutmap {
namespace {

class AppliedClosuresTest : public testing::Test {
 protected:
  AppliedClosures closures() { return AppliedClosures(state_); }

  // Handles an update in the same way as a server. Returns whether this call
  // applied the closure.
  bool Apply(int64_t epoch, int64_t number, int64_t attempt = 0) {
    bool is_repeated = false;
    const ClosureToken token = {epoch, number, attempt};
    const Status status = closures().Check(token, &is_repeated);
    EXPECT_TRUE(status.ok()) << status.message();
    if (!is_repeated) closures().Apply(token, closures().num_updates());
    return !is_repeated;
  }

  std::string ErrorMessage(int64_t epoch, int64_t number, int64_t attempt = 0) {
    const std::vector<int64_t> before = state_;
    bool is_repeated = false;
    const std::string message =
        closures().Check({epoch, number, attempt}, &is_repeated).message();
    EXPECT_EQ(state_, before);
    return message;
  }

  std::vector<int64_t> state_ = std::vector<int64_t>(AppliedClosures::kSize, 0);
};

TEST_F(AppliedClosuresTest, EachNumberIsAppliedOnceInAnyOrder) {
  std::mt19937 random(1);
  std::set<int64_t> applied;
  int64_t oldest = 0;
  for (int i = 0; i < 20000; ++i) {
    const int64_t number = oldest + static_cast<int64_t>(random() % 40) - 20;
    if (number < 0) continue;
    EXPECT_EQ(Apply(1, number), applied.insert(number).second) << number;
    while (applied.count(oldest) > 0) ++oldest;
  }
  EXPECT_GT(oldest, 2 * AppliedClosures::kWindow);
  EXPECT_EQ(closures().num_updates(), static_cast<int64_t>(applied.size()));
}

TEST_F(AppliedClosuresTest, ClosuresWithoutANumberAreAlwaysApplied) {
  EXPECT_TRUE(Apply(0, -1));
  EXPECT_TRUE(Apply(0, -1));
  EXPECT_EQ(closures().num_updates(), 2);
}

TEST_F(AppliedClosuresTest, ANewEpochStartsAtZeroAndEndsTheEarlierEpoch) {
  EXPECT_TRUE(Apply(1, 0));
  EXPECT_TRUE(Apply(1, 7));
  EXPECT_TRUE(Apply(2, 7));
  EXPECT_TRUE(Apply(2, 0));
  EXPECT_FALSE(Apply(2, 7));
  EXPECT_NE(ErrorMessage(1, 1).find("epoch 2 has begun"), std::string::npos);
  EXPECT_EQ(closures().num_updates(), 4);
}

TEST_F(AppliedClosuresTest, ARunOfAClosureAppliesOnlyOnce) {
  EXPECT_TRUE(Apply(1, 0, 500));
  EXPECT_FALSE(Apply(1, 0, 501));
  EXPECT_NE(ErrorMessage(1, 0, 500).find("only once"), std::string::npos);
  // Closure 0 is also rejected after `base` has become larger than its number.
  for (int64_t n = 1; n < 100; ++n) EXPECT_TRUE(Apply(1, n, 500 + n));
  EXPECT_FALSE(Apply(1, 0, 7));
  EXPECT_NE(ErrorMessage(1, 0, 500).find("only once"), std::string::npos);
}

TEST_F(AppliedClosuresTest, ANumberBeyondTheWindowIsRejected) {
  EXPECT_TRUE(Apply(1, 1));
  EXPECT_TRUE(Apply(1, AppliedClosures::kWindow - 1));
  EXPECT_NE(ErrorMessage(1, AppliedClosures::kWindow).find("closure 0 was"),
            std::string::npos);
  EXPECT_TRUE(Apply(1, 0));
  EXPECT_TRUE(Apply(1, AppliedClosures::kWindow));
  EXPECT_NE(ErrorMessage(2, AppliedClosures::kWindow).find("closure 0 was"),
            std::string::npos);
}

TEST_F(AppliedClosuresTest, InvalidTokensAndStatesAreRejected) {
  EXPECT_NE(ErrorMessage(0, 0), "");
  EXPECT_NE(ErrorMessage(1, INT64_MAX), "");
  EXPECT_NE(ErrorMessage(INT64_MAX, 0), "");
  for (int64_t place = 0; place < AppliedClosures::kNumCounts; ++place) {
    for (const int64_t count : {int64_t{-1}, INT64_MAX, INT64_MIN}) {
      state_[place] = count;
      EXPECT_NE(ErrorMessage(1, 0).find("must start as zeros"),
                std::string::npos);
      EXPECT_NE(ErrorMessage(0, -1).find("must start as zeros"),
                std::string::npos);
    }
    state_[place] = 0;
  }
}

TEST_F(AppliedClosuresTest, StalenessIsCounted) {
  for (int i = 0; i < 5; ++i) closures().Apply({0, -1, 0}, 0);
  closures().Apply({0, -1, 0}, 5);
  closures().Repeat();
  EXPECT_EQ(state_[2], 6);
  EXPECT_EQ(state_[3], 0 + 1 + 2 + 3 + 4 + 0);
  EXPECT_EQ(state_[4], 4);
  EXPECT_EQ(state_[5], 1);
}

}  // namespace
}  // namespace layoutmap
