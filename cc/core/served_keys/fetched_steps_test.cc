#include "cc/core/served_keys/fetched_steps.h"

#include <cstdint>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace layoutmap {
namespace {

class FetchedStepsTest : public testing::Test {
 protected:
  FetchedSteps steps() { return FetchedSteps(state_); }

  // Handles a fetch in the same way as a server, and returns the ticket.
  int64_t Fetch(const ClosureToken& token, int64_t num_updates = 0) {
    bool is_repeated = false;
    const Status status = steps().Check(token, &is_repeated);
    EXPECT_TRUE(status.ok()) << status.message();
    steps().Begin(token);
    return is_repeated ? steps().Renew(token, num_updates)
                       : steps().Add(token, num_updates);
  }

  bool IsPending(int64_t ticket) {
    int64_t num_updates = 0;
    return steps().Find(ticket, &num_updates).ok();
  }

  std::string ErrorMessage(const ClosureToken& token) {
    const std::vector<int64_t> before = state_;
    bool is_repeated = false;
    const std::string message = steps().Check(token, &is_repeated).message();
    EXPECT_EQ(state_, before);
    return message;
  }

  std::vector<int64_t> state_ = std::vector<int64_t>(FetchedSteps::kSize, 0);
};

const ClosureToken kNone;

TEST_F(FetchedStepsTest, AStepIsPendingUntilItIsForgotten) {
  EXPECT_EQ(steps().OldestAge(), 0);
  const int64_t first = Fetch(kNone), second = Fetch({1, 0, 7}, 5);
  EXPECT_EQ(steps().OldestAge(), 2);
  int64_t num_updates = 0;
  ASSERT_TRUE(steps().Find(second, &num_updates).ok());
  EXPECT_EQ(num_updates, 5);
  steps().Forget(first);
  EXPECT_EQ(steps().OldestAge(), 1);
  steps().Forget(second);
  steps().Forget(second);
  EXPECT_EQ(steps().OldestAge(), 0);
  EXPECT_FALSE(IsPending(first));
}

TEST_F(FetchedStepsTest, ARepeatedClosureKeepsItsStepAndGetsANewTicket) {
  const int64_t first = Fetch({1, 3, 7});
  Fetch({1, 4, 8});
  EXPECT_EQ(steps().AgeOf({1, 3, 9}), 2);
  const int64_t again = Fetch({1, 3, 9}, 2);
  EXPECT_EQ(steps().AgeOf({1, 3, 9}), 2);
  EXPECT_FALSE(IsPending(first));
  EXPECT_TRUE(IsPending(again));
}

TEST_F(FetchedStepsTest, OneRunFetchesOnlyOnce) {
  Fetch({1, 3, 7});
  EXPECT_NE(ErrorMessage({1, 3, 7}).find("only once"), std::string::npos);
  EXPECT_EQ(ErrorMessage({1, 4, 7}), "");
}

TEST_F(FetchedStepsTest, LookupsOfAStepShareItsTicketAndPinTheirRows) {
  const int64_t ticket = Fetch({1, 3, 7, 0});
  Fetch({1, 4, 8, 0});
  EXPECT_EQ(Fetch({1, 3, 7, 1}), ticket);
  EXPECT_EQ(Fetch({1, 3, 7, 2}), ticket);
  EXPECT_EQ(steps().OldestAge(), 4);
  steps().Forget(ticket);
  EXPECT_EQ(steps().OldestAge(), 3);
}

TEST_F(FetchedStepsTest, AnotherRunCountsOnlyLookupsThatWereNotCounted) {
  const int64_t first = Fetch({1, 3, 7, 0});
  Fetch({1, 3, 7, 1});
  bool is_repeated = false;
  const int64_t again = Fetch({1, 3, 9, 0});
  EXPECT_FALSE(IsPending(first));
  ASSERT_TRUE(steps().Check({1, 3, 9, 1}, &is_repeated).ok());
  EXPECT_TRUE(is_repeated);
  EXPECT_EQ(Fetch({1, 3, 9, 1}), again);
  ASSERT_TRUE(steps().Check({1, 3, 9, 2}, &is_repeated).ok());
  EXPECT_FALSE(is_repeated);
  EXPECT_EQ(Fetch({1, 3, 9, 2}), again);
  EXPECT_EQ(steps().AgeOf({1, 3, 9, 0}), 3);
}

TEST_F(FetchedStepsTest, LookupsMustBeInOrder) {
  const std::string missing = "must follow the earlier lookups";
  EXPECT_NE(ErrorMessage({1, 3, 7, 1}).find(missing), std::string::npos);
  Fetch({1, 3, 7, 0});
  EXPECT_NE(ErrorMessage({1, 3, 7, 2}).find(missing), std::string::npos);
  // The lookup of another run, whose first lookup did not arrive.
  EXPECT_NE(ErrorMessage({1, 3, 9, 1}).find(missing), std::string::npos);
  Fetch({1, 3, 7, 1});
  EXPECT_NE(ErrorMessage({1, 3, 7, 1}).find("only once"), std::string::npos);
}

TEST_F(FetchedStepsTest, LookupsWithoutAClosureSendTheTicketOfTheirStep) {
  const int64_t first = Fetch(kNone), second = Fetch(kNone);
  EXPECT_EQ(Fetch({0, -1, first, 1}), first);
  EXPECT_EQ(Fetch({0, -1, second, 1}), second);
  EXPECT_EQ(Fetch({0, -1, first, 2}), first);
  EXPECT_NE(ErrorMessage({0, -1, second, 3}).find("must follow"),
            std::string::npos);
  EXPECT_EQ(steps().OldestAge(), 5);
  steps().Forget(first);
  EXPECT_NE(ErrorMessage({0, -1, first, 3}).find("must follow"),
            std::string::npos);
  EXPECT_EQ(steps().OldestAge(), 4);
}

TEST_F(FetchedStepsTest, ANewEpochEndsEarlierClosures) {
  const int64_t old = Fetch({1, 3, 7}), open = Fetch(kNone);
  const int64_t fresh = Fetch({2, 3, 8});
  EXPECT_FALSE(IsPending(old));
  EXPECT_TRUE(IsPending(open));
  EXPECT_TRUE(IsPending(fresh));
  EXPECT_NE(ErrorMessage({1, 4, 9}).find("discarded"), std::string::npos);
}

TEST_F(FetchedStepsTest, StepsWithoutAClosureExpire) {
  const int64_t first = Fetch(kNone);
  for (int64_t i = 1; i < FetchedSteps::kMaxOpen; ++i) Fetch(kNone);
  EXPECT_EQ(steps().OldestAge(), FetchedSteps::kMaxOpen);
  EXPECT_TRUE(IsPending(first));
  Fetch(kNone);
  EXPECT_EQ(steps().OldestAge(), FetchedSteps::kMaxOpen);
  EXPECT_FALSE(IsPending(first));
}

TEST_F(FetchedStepsTest, AnInvalidStateIsRejected) {
  state_[1] = -5;
  EXPECT_NE(ErrorMessage(kNone).find("must start as zeros"), std::string::npos);
}

}  // namespace
}  // namespace layoutmap
