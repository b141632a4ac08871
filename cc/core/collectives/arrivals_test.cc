#include "cc/core/collectives/arrivals.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace layoutmap {
namespace {

using Outcome = ArrivalTable::Outcome;

// Counts how often the table returned it.
class Device : public Arrival {
 public:
  explicit Device(int rank) : rank(rank) {}

  const int rank;
  std::atomic<int> num_returned{0};
};

std::shared_ptr<Device> MakeDevice(int rank) {
  return std::make_shared<Device>(rank);
}

void CountReturned(const Arrivals& arrivals) {
  for (const auto& arrival : arrivals) {
    static_cast<Device*>(arrival.get())->num_returned++;
  }
}

constexpr CollectiveKey kKey = {1, 2, 3, 4};

TEST(ArrivalTable, LastDeviceGetsAllInOrderOfRanks) {
  ArrivalTable table;
  for (int repeat = 0; repeat < 2; ++repeat) {
    EXPECT_EQ(table.Arrive(kKey, 2, 3, MakeDevice(2)).outcome,
              Outcome::kWaiting);
    EXPECT_EQ(table.Arrive(kKey, 0, 3, MakeDevice(0)).outcome,
              Outcome::kWaiting);
    const auto result = table.Arrive(kKey, 1, 3, MakeDevice(1));
    EXPECT_EQ(result.outcome, Outcome::kComplete);
    ASSERT_EQ(result.arrivals.size(), 3);
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(static_cast<Device*>(result.arrivals[rank].get())->rank, rank);
    }
  }
}

TEST(ArrivalTable, GroupOfOneIsCompleteAtOnce) {
  ArrivalTable table;
  EXPECT_EQ(table.Arrive(kKey, 0, 1, MakeDevice(0)).outcome,
            Outcome::kComplete);
}

TEST(ArrivalTable, OperationsWithDifferentKeysAreIndependent) {
  ArrivalTable table;
  const CollectiveKey keys[] = {
      kKey, {0, 2, 3, 4}, {1, 0, 3, 4}, {1, 2, 0, 4}, {1, 2, 3, 0}};
  for (const CollectiveKey& key : keys) {
    EXPECT_EQ(table.Arrive(key, 0, 2, MakeDevice(0)).outcome,
              Outcome::kWaiting);
  }
  for (const CollectiveKey& key : keys) {
    EXPECT_EQ(table.Arrive(key, 1, 2, MakeDevice(1)).outcome,
              Outcome::kComplete);
  }
}

TEST(ArrivalTable, SecondArrivalOfARankFailsAllDevices) {
  ArrivalTable table;
  EXPECT_EQ(table.Arrive(kKey, 1, 3, MakeDevice(1)).outcome, Outcome::kWaiting);
  const auto result = table.Arrive(kKey, 1, 3, MakeDevice(1));
  EXPECT_EQ(result.outcome, Outcome::kConflict);
  EXPECT_EQ(result.arrivals.size(), 2);
  // The next operation with this key is not affected.
  EXPECT_EQ(table.Arrive(kKey, 0, 2, MakeDevice(0)).outcome, Outcome::kWaiting);
  EXPECT_EQ(table.Arrive(kKey, 1, 2, MakeDevice(1)).outcome,
            Outcome::kComplete);
}

TEST(ArrivalTable, GroupSizesOfAllDevicesMustBeEqual) {
  for (int size : {2, 4}) {
    ArrivalTable table;
    EXPECT_EQ(table.Arrive(kKey, 0, 3, MakeDevice(0)).outcome,
              Outcome::kWaiting);
    EXPECT_EQ(table.Arrive(kKey, size - 1, size, MakeDevice(1)).outcome,
              Outcome::kConflict);
  }
}

TEST(ArrivalTable, WithdrawalFailsAllDevicesThatWait) {
  ArrivalTable table;
  auto first = MakeDevice(0);
  EXPECT_EQ(table.Arrive(kKey, 0, 3, first).outcome, Outcome::kWaiting);
  EXPECT_EQ(table.Arrive(kKey, 1, 3, MakeDevice(1)).outcome, Outcome::kWaiting);
  EXPECT_EQ(table.Withdraw(first).size(), 2);
  EXPECT_TRUE(table.Withdraw(first).empty());
}

TEST(ArrivalTable, WithdrawalBeforeTheArrival) {
  ArrivalTable table;
  auto device = MakeDevice(0);
  EXPECT_TRUE(table.Withdraw(device).empty());
  const auto result = table.Arrive(kKey, 0, 2, device);
  EXPECT_EQ(result.outcome, Outcome::kWithdrawn);
  EXPECT_EQ(result.arrivals.size(), 1);
}

TEST(ArrivalTable, WithdrawalAfterTheOperationHasNoEffect) {
  ArrivalTable table;
  auto device = MakeDevice(0);
  EXPECT_EQ(table.Arrive(kKey, 0, 1, device).outcome, Outcome::kComplete);
  EXPECT_TRUE(table.Withdraw(device).empty());
}

TEST(ArrivalTable, CloseFailsAllDevicesThatWaitAndAllLaterOnes) {
  ArrivalTable table;
  EXPECT_EQ(table.Arrive(kKey, 0, 2, MakeDevice(0)).outcome, Outcome::kWaiting);
  EXPECT_EQ(table.Arrive({5, 6, 7, 8}, 1, 2, MakeDevice(1)).outcome,
            Outcome::kWaiting);
  EXPECT_EQ(table.Close().size(), 2);
  const auto result = table.Arrive(kKey, 1, 2, MakeDevice(1));
  EXPECT_EQ(result.outcome, Outcome::kClosed);
  EXPECT_EQ(result.arrivals.size(), 1);
}

// Threads arrive in any order while another thread withdraws some devices.
TEST(ArrivalTable, EachArrivalIsReturnedOnce) {
  constexpr int kRanks = 3, kSteps = 300;
  ArrivalTable table;
  std::vector<std::vector<std::shared_ptr<Device>>> devices(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    for (int step = 0; step < kSteps; ++step) {
      devices[rank].push_back(MakeDevice(rank));
    }
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      for (int step = 0; step < kSteps; ++step) {
        const CollectiveKey key = {1, 1, 0, step};
        CountReturned(
            table.Arrive(key, rank, kRanks, devices[rank][step]).arrivals);
      }
    });
  }
  threads.emplace_back([&] {
    for (int step = 0; step < kSteps; step += 7) {
      CountReturned(table.Withdraw(devices[step % kRanks][step]));
    }
  });
  for (std::thread& thread : threads) thread.join();
  CountReturned(table.Close());
  for (const auto& of_rank : devices) {
    for (const auto& device : of_rank) EXPECT_EQ(device->num_returned, 1);
  }
}

}  // namespace
}  // namespace layoutmap
