#include "cc/emulation/pending_calls.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/emulation/workers_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// The result of a call. One thread can wait for the result.
class Outcome {
 public:
  void Set(PendingCalls::End end, const Status& status) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++num_ends_;
    end_ = end;
    status_ = status;
    changed_.notify_all();
  }
  void Await() {
    std::unique_lock<std::mutex> lock(mutex_);
    ASSERT_TRUE(
        changed_.wait_for(lock, seconds(30), [&] { return num_ends_ > 0; }));
  }
  int num_ends() {
    std::lock_guard<std::mutex> lock(mutex_);
    return num_ends_;
  }
  PendingCalls::End end() { return end_; }
  const Status& status() { return status_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int num_ends_ = 0;
  PendingCalls::End end_ = PendingCalls::End::kAttempted;
  Status status_;
};

class PendingCallsTest : public testing::Test {
 protected:
  PendingCalls::Call MakeCall(std::function<Status()> attempt, Outcome* outcome,
                              PendingCalls::Clock::duration patience) {
    PendingCalls::Call call;
    call.name = "call";
    call.attempt = std::move(attempt);
    call.finish = [outcome](PendingCalls::End end, const Status& status) {
      outcome->Set(end, status);
    };
    call.schedule = [this](std::function<void()> work) {
      workers.Schedule(std::move(work));
    };
    call.patience = patience;
    return call;
  }

  std::shared_ptr<PendingCalls::Ticket> Run(
      std::function<Status()> attempt, Outcome* outcome,
      PendingCalls::Clock::duration patience = seconds(30)) {
    auto ticket = calls.Admit(MakeCall(std::move(attempt), outcome, patience));
    calls.Start(ticket);
    return ticket;
  }

  PendingCalls calls;
  // The workers are declared before `calls`, because the calls use them.
  Workers workers{4};
};

Status Never() { return NotYet("for nothing"); }

TEST_F(PendingCallsTest, ACompleteCallEndsImmediately) {
  Outcome fine, wrong;
  Run([] { return Status(); }, &fine);
  EXPECT_EQ(fine.num_ends(), 1);
  EXPECT_TRUE(fine.status().ok());
  Run([] { return InvalidArgument("id 7"); }, &wrong);
  EXPECT_EQ(wrong.num_ends(), 1);
  EXPECT_EQ(wrong.status().message(), "id 7");
  EXPECT_TRUE(calls.Waiting().empty());
}

TEST_F(PendingCallsTest, ACallWaitsForAChange) {
  std::atomic<bool> is_there{false};
  Outcome outcome;
  Run([&] { return is_there ? Status() : Never(); }, &outcome);
  EXPECT_EQ(calls.Waiting(), (std::vector<std::string>{"call"}));
  // This change does not affect the call.
  calls.Changed();
  EXPECT_EQ(outcome.num_ends(), 0);
  is_there = true;
  calls.Changed();
  outcome.Await();
  EXPECT_EQ(outcome.end(), PendingCalls::End::kAttempted);
  EXPECT_TRUE(outcome.status().ok());
}

TEST_F(PendingCallsTest, AFinishedCallCausesNewAttempts) {
  std::atomic<bool> is_there{false};
  Outcome waits, brings;
  Run([&] { return is_there ? Status() : Never(); }, &waits);
  Run(
      [&] {
        is_there = true;
        return Status();
      },
      &brings);
  waits.Await();
  EXPECT_TRUE(waits.status().ok());
}

TEST_F(PendingCallsTest, ACallExpiresAtItsDeadline) {
  Outcome shorter, longer;
  Run(Never, &longer, seconds(600));
  Run(Never, &shorter, milliseconds(5));
  shorter.Await();
  EXPECT_EQ(shorter.end(), PendingCalls::End::kExpired);
  EXPECT_EQ(shorter.status().message(), "for nothing");
  EXPECT_EQ(longer.num_ends(), 0);
  calls.Close(FailedPrecondition("closed"));
  longer.Await();
}

TEST_F(PendingCallsTest, ACallCanBeCancelledBeforeAndDuringItsWait) {
  Outcome before, after;
  auto ticket = calls.Admit(MakeCall(Never, &before, seconds(30)));
  calls.Cancel(ticket, FailedPrecondition("stopped"));
  EXPECT_EQ(before.num_ends(), 0);
  calls.Start(ticket);
  EXPECT_EQ(before.end(), PendingCalls::End::kCancelled);
  EXPECT_EQ(before.status().message(), "stopped");
  auto parked = Run(Never, &after);
  calls.Cancel(parked, FailedPrecondition("stopped"));
  calls.Cancel(parked, FailedPrecondition("twice"));
  EXPECT_EQ(after.num_ends(), 1);
  EXPECT_EQ(after.status().message(), "stopped");
}

TEST_F(PendingCallsTest, CallsAfterCloseAreCancelled) {
  Outcome outcome;
  calls.Close(FailedPrecondition("closed"));
  Run([] { return Status(); }, &outcome);
  EXPECT_EQ(outcome.end(), PendingCalls::End::kCancelled);
  EXPECT_EQ(outcome.status().message(), "closed");
}

TEST_F(PendingCallsTest, EachConcurrentCallEndsOnce) {
  constexpr int kNumCalls = 400;
  std::vector<Outcome> outcomes(kNumCalls);
  std::atomic<int> tokens{0};
  const auto take = [&] {
    int there = tokens.load();
    while (there > 0) {
      if (tokens.compare_exchange_weak(there, there - 1)) return Status();
    }
    return NotYet("for a token");
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = t; i < kNumCalls; i += 8) {
        auto ticket =
            Run(take, &outcomes[i], milliseconds(random() % 4 ? 30000 : 1));
        if (random() % 4 == 0) {
          calls.Cancel(ticket, FailedPrecondition("stopped"));
        }
        ++tokens;
        calls.Changed();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  int num_taken = 0;
  for (Outcome& outcome : outcomes) {
    outcome.Await();
    EXPECT_EQ(outcome.num_ends(), 1);
    num_taken += outcome.end() == PendingCalls::End::kAttempted;
  }
  EXPECT_EQ(num_taken + tokens, kNumCalls);
  EXPECT_TRUE(calls.Waiting().empty());
}

// Stores scheduled work. The test runs the work on its own thread by calling
// `Run`.
class Later {
 public:
  void Schedule(std::function<void()> work) {
    work_.push_back(std::move(work));
  }
  void Run() {
    for (const auto& work : std::exchange(work_, {})) work();
  }

 private:
  std::vector<std::function<void()>> work_;
};

// Returns a call that owns `kept` and waits until `*is_there` is true.
template <typename Kept>
PendingCalls::Call Holding(Kept kept, const bool* is_there, Later* later,
                           PendingCalls::Clock::duration patience) {
  PendingCalls::Call call;
  call.name = "call";
  call.attempt = [is_there] { return *is_there ? Status() : Never(); };
  call.finish = [kept = std::move(kept)](PendingCalls::End, const Status&) {};
  call.schedule = [later](std::function<void()> work) {
    later->Schedule(std::move(work));
  };
  call.patience = patience;
  return call;
}

// Sleeps until `Watch` probably waits for the deadline of the call that has
// just parked. If this time is too short, an incorrect `Watch` can pass the
// test, but a correct `Watch` cannot fail it.
void LetItWatch() { std::this_thread::sleep_for(milliseconds(20)); }

TEST(PendingCallsLifeTest, AFinishedCallReleasesItsResources) {
  PendingCalls calls;
  Later later;
  bool is_there = false;
  auto kept = std::make_shared<int>(7);
  const std::weak_ptr<int> watched = kept;
  calls.Start(
      calls.Admit(Holding(std::move(kept), &is_there, &later, seconds(600))));
  LetItWatch();
  EXPECT_FALSE(watched.expired());
  is_there = true;
  calls.Changed();
  later.Run();
  EXPECT_TRUE(watched.expired());
}

TEST(PendingCallsLifeTest, ACallMayHoldTheLastReferenceToPendingCalls) {
  Later later;
  bool is_there = false;
  auto is_gone = std::make_shared<Outcome>();
  std::shared_ptr<PendingCalls> calls(new PendingCalls, [is_gone](auto* owned) {
    delete owned;
    is_gone->Set(PendingCalls::End::kAttempted, Status());
  });
  calls->Start(
      calls->Admit(Holding(calls, &is_there, &later, milliseconds(60))));
  LetItWatch();
  is_there = true;
  calls->Changed();
  calls.reset();
  later.Run();
  is_gone->Await();
}

TEST(PendingCallsLifeTest,
     ACallThatExpiresMayHoldTheLastReferenceToPendingCalls) {
  Later later;
  const bool is_there = false;
  auto is_gone = std::make_shared<Outcome>();
  std::shared_ptr<PendingCalls> calls(new PendingCalls, [is_gone](auto* owned) {
    delete owned;
    is_gone->Set(PendingCalls::End::kAttempted, Status());
  });
  calls->Start(
      calls->Admit(Holding(calls, &is_there, &later, milliseconds(5))));
  calls.reset();
  is_gone->Await();
}

}  // namespace
}  // namespace layoutmap
