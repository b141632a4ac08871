#include "cc/emulation/pending_calls.h"

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "cc/emulation/workers_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// How a call ended, for one thread to wait for.
class Outcome {
 public:
  void Set(WaitingRoom::End end, const Status& status) {
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
  WaitingRoom::End end() { return end_; }
  const Status& status() { return status_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int num_ends_ = 0;
  WaitingRoom::End end_ = WaitingRoom::End::kAttempted;
  Status status_;
};

class WaitingRoomTest : public testing::Test {
 protected:
  WaitingRoom::Call CallOf(std::function<Status()> attempt, Outcome* outcome,
                           WaitingRoom::Clock::duration patience) {
    WaitingRoom::Call call;
    call.name = "call";
    call.attempt = std::move(attempt);
    call.finish = [outcome](WaitingRoom::End end, const Status& status) {
      outcome->Set(end, status);
    };
    call.schedule = [this](std::function<void()> work) {
      workers.Schedule(std::move(work));
    };
    call.patience = patience;
    return call;
  }

  std::shared_ptr<WaitingRoom::Ticket> Run(
      std::function<Status()> attempt, Outcome* outcome,
      WaitingRoom::Clock::duration patience = seconds(30)) {
    auto ticket = room.Admit(CallOf(std::move(attempt), outcome, patience));
    room.Start(ticket);
    return ticket;
  }

  WaitingRoom room;
  Workers workers{4};  // before the room: its calls run there
};

Status Never() { return NotYet("for nothing"); }

TEST_F(WaitingRoomTest, ACallThatCanBeCarriedOutEndsAtOnce) {
  Outcome fine, wrong;
  Run([] { return Status(); }, &fine);
  EXPECT_EQ(fine.num_ends(), 1);
  EXPECT_TRUE(fine.status().ok());
  Run([] { return InvalidArgument("id 7"); }, &wrong);
  EXPECT_EQ(wrong.num_ends(), 1);
  EXPECT_EQ(wrong.status().message(), "id 7");
  EXPECT_TRUE(room.Waiting().empty());
}

TEST_F(WaitingRoomTest, ACallWaitsForAChange) {
  std::atomic<bool> is_there{false};
  Outcome outcome;
  Run([&] { return is_there ? Status() : Never(); }, &outcome);
  EXPECT_EQ(room.Waiting(), (std::vector<std::string>{"call"}));
  room.Changed();  // of something else
  EXPECT_EQ(outcome.num_ends(), 0);
  is_there = true;
  room.Changed();
  outcome.Await();
  EXPECT_EQ(outcome.end(), WaitingRoom::End::kAttempted);
  EXPECT_TRUE(outcome.status().ok());
}

TEST_F(WaitingRoomTest, AFinishedCallIsAChange) {
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

TEST_F(WaitingRoomTest, PatienceEnds) {
  Outcome shorter, longer;
  Run(Never, &longer, seconds(600));
  Run(Never, &shorter, milliseconds(5));
  shorter.Await();
  EXPECT_EQ(shorter.end(), WaitingRoom::End::kExpired);
  EXPECT_EQ(shorter.status().message(), "for nothing");
  EXPECT_EQ(longer.num_ends(), 0);
  room.Close(FailedPrecondition("closed"));
  longer.Await();
}

TEST_F(WaitingRoomTest, ACallCanBeCancelledBeforeAndWhileItWaits) {
  Outcome before, after;
  auto ticket = room.Admit(CallOf(Never, &before, seconds(30)));
  room.Cancel(ticket, FailedPrecondition("stopped"));
  EXPECT_EQ(before.num_ends(), 0);
  room.Start(ticket);
  EXPECT_EQ(before.end(), WaitingRoom::End::kCancelled);
  EXPECT_EQ(before.status().message(), "stopped");
  auto parked = Run(Never, &after);
  room.Cancel(parked, FailedPrecondition("stopped"));
  room.Cancel(parked, FailedPrecondition("twice"));
  EXPECT_EQ(after.num_ends(), 1);
  EXPECT_EQ(after.status().message(), "stopped");
}

TEST_F(WaitingRoomTest, AClosedRoomTakesNobody) {
  Outcome outcome;
  room.Close(FailedPrecondition("closed"));
  Run([] { return Status(); }, &outcome);
  EXPECT_EQ(outcome.end(), WaitingRoom::End::kCancelled);
  EXPECT_EQ(outcome.status().message(), "closed");
}

TEST_F(WaitingRoomTest, EachOfManyCallsEndsOnce) {
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
          room.Cancel(ticket, FailedPrecondition("stopped"));
        }
        ++tokens;
        room.Changed();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  int num_taken = 0;
  for (Outcome& outcome : outcomes) {
    outcome.Await();
    EXPECT_EQ(outcome.num_ends(), 1);
    num_taken += outcome.end() == WaitingRoom::End::kAttempted;
  }
  EXPECT_EQ(num_taken + tokens, kNumCalls);
  EXPECT_TRUE(room.Waiting().empty());
}

// Work that a test carries out itself, on its own thread.
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

// A call that waits until `is_there`, and holds `kept` for as long as it lives.
template <typename Kept>
WaitingRoom::Call Holding(Kept kept, const bool* is_there, Later* later,
                          WaitingRoom::Clock::duration patience) {
  WaitingRoom::Call call;
  call.name = "call";
  call.attempt = [is_there] { return *is_there ? Status() : Never(); };
  call.finish = [kept = std::move(kept)](WaitingRoom::End, const Status&) {};
  call.schedule = [later](std::function<void()> work) {
    later->Schedule(std::move(work));
  };
  call.patience = patience;
  return call;
}

// Long enough for the watch to wait for the deadline of a call that has just
// parked. Were it too short, a watch that is wrong could pass, none could fail.
void LetItWatch() { std::this_thread::sleep_for(milliseconds(20)); }

TEST(WaitingRoomLifeTest, WhatACallHeldIsDroppedAsItEnds) {
  WaitingRoom room;
  Later later;
  bool is_there = false;
  auto kept = std::make_shared<int>(7);
  const std::weak_ptr<int> watched = kept;
  room.Start(
      room.Admit(Holding(std::move(kept), &is_there, &later, seconds(600))));
  LetItWatch();
  EXPECT_FALSE(watched.expired());
  is_there = true;
  room.Changed();
  later.Run();
  EXPECT_TRUE(watched.expired());
}

TEST(WaitingRoomLifeTest, ACallMayHoldTheLastReferenceToItsRoom) {
  Later later;
  bool is_there = false;
  auto is_gone = std::make_shared<Outcome>();
  std::shared_ptr<WaitingRoom> room(new WaitingRoom, [is_gone](auto* owned) {
    delete owned;
    is_gone->Set(WaitingRoom::End::kAttempted, Status());
  });
  room->Start(room->Admit(Holding(room, &is_there, &later, milliseconds(60))));
  LetItWatch();
  is_there = true;
  room->Changed();
  room.reset();
  later.Run();
  is_gone->Await();
}

TEST(WaitingRoomLifeTest, ACallThatExpiresMayHoldTheLastReferenceToItsRoom) {
  Later later;
  const bool is_there = false;
  auto is_gone = std::make_shared<Outcome>();
  std::shared_ptr<WaitingRoom> room(new WaitingRoom, [is_gone](auto* owned) {
    delete owned;
    is_gone->Set(WaitingRoom::End::kAttempted, Status());
  });
  room->Start(room->Admit(Holding(room, &is_there, &later, milliseconds(5))));
  room.reset();
  is_gone->Await();
}

}  // namespace
}  // namespace layoutmap
