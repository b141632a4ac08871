#include "cc/core/rows/row_partition.h"

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/tables/table_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

constexpr int64_t kTwo32 = int64_t{1} << 32;

std::string ErrorMessage(Placement placement,
                         const std::vector<int64_t>& offsets) {
  RowPartition partition;
  const Status status = RowPartition::Make(placement, offsets, &partition);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_EQ(partition.num_rows(), 0) << "a failed call changed the partition";
  return status.message();
}

TEST(DividerTest, IsExactOnBothSidesOfEveryMultiple) {
  std::mt19937_64 random(1);
  std::vector<uint64_t> divisors;
  for (uint64_t d = 1; d <= 300; ++d) divisors.push_back(d);
  for (int bit = 8; bit <= 32; ++bit) {
    for (int64_t delta : {-1, 0, 1}) {
      divisors.push_back((uint64_t{1} << bit) + delta);
    }
  }
  for (int i = 0; i < 300; ++i) divisors.push_back(random() % kTwo32 + 1);
  for (uint64_t d : divisors) {
    const Divider divide(d);
    std::vector<uint64_t> quotients = {0, 1, 2, (kTwo32 - 1) / d};
    for (int i = 0; i < 50; ++i) quotients.push_back(random() % kTwo32 / d);
    for (uint64_t q : quotients) {
      for (int64_t delta : {-1, 0, 1}) {
        const uint64_t n = q * d + delta;
        // The test skips numbers that are too large, and negative numbers,
        // which are very large after the conversion to uint64_t.
        if (n >= static_cast<uint64_t>(kTwo32)) continue;
        ASSERT_EQ(divide(n), n / d) << n << " / " << d;
      }
    }
    ASSERT_EQ(divide(kTwo32 - 1), (kTwo32 - 1) / d) << d;
  }
}

// Computes the expected owner with a loop over the shards.
RowOwner ReferenceOwner(Placement placement,
                        const std::vector<int64_t>& offsets, int64_t row) {
  const int64_t num_shards = static_cast<int64_t>(offsets.size()) - 1;
  if (placement == Placement::kMod) {
    return {static_cast<int32_t>(row % num_shards), row / num_shards};
  }
  for (int32_t s = 0; s < num_shards; ++s) {
    if (offsets[s] <= row && row < offsets[s + 1]) {
      return {s, row - offsets[s]};
    }
  }
  ADD_FAILURE() << "no shard owns row " << row;
  return {-1, -1};
}

void ExpectOwner(const RowPartition& partition, int64_t row) {
  const RowOwner expected =
      ReferenceOwner(partition.placement(), partition.offsets(), row);
  const RowOwner owner = partition.Locate(row);
  ASSERT_EQ(owner.shard, expected.shard) << "row " << row;
  ASSERT_EQ(owner.local_row, expected.local_row) << "row " << row;
  ASSERT_LT(owner.local_row, partition.shard_size(owner.shard));
  ASSERT_EQ(partition.GlobalRow(owner), row);
}

TEST(RowPartitionTest, LocatesEveryRowOfSmallEvenTables) {
  for (Placement placement : {Placement::kDiv, Placement::kMod}) {
    for (int64_t num_rows = 0; num_rows <= 40; ++num_rows) {
      for (int64_t num_shards = 1; num_shards <= 45; ++num_shards) {
        const RowPartition partition =
            MakePartition(placement, EvenOffsets(num_rows, num_shards));
        ASSERT_EQ(partition.num_rows(), num_rows);
        ASSERT_EQ(partition.num_shards(), num_shards);
        for (int64_t row = 0; row < num_rows; ++row) {
          ExpectOwner(partition, row);
        }
      }
    }
  }
}

TEST(RowPartitionTest, LocatesEveryRowOfUnevenBlocks) {
  std::mt19937 random(2);
  for (int round = 0; round < 500; ++round) {
    std::vector<int64_t> offsets = {0};
    const int num_shards = 1 + random() % 12;
    for (int s = 0; s < num_shards; ++s) {
      // On average, every third shard is empty. The first and the last shard
      // can also be empty.
      offsets.push_back(offsets.back() + (random() % 3 ? random() % 7 : 0));
    }
    const RowPartition partition = MakePartition(Placement::kOffsets, offsets);
    for (int64_t row = 0; row < partition.num_rows(); ++row) {
      ExpectOwner(partition, row);
    }
  }
}

TEST(RowPartitionTest, LocatesRowsAtTheShardBordersOfTheLargestTable) {
  for (Placement placement : {Placement::kDiv, Placement::kMod}) {
    for (int64_t num_rows : {kTwo32, kTwo32 - 1, kTwo32 - 12345}) {
      for (int64_t num_shards : {1, 2, 3, 7, 64, 1000, 4093}) {
        const RowPartition partition =
            MakePartition(placement, EvenOffsets(num_rows, num_shards));
        for (int64_t offset : partition.offsets()) {
          for (int64_t row : {offset - 1, offset, offset + 1}) {
            if (row >= 0 && row < num_rows) ExpectOwner(partition, row);
          }
        }
      }
    }
  }
}

TEST(RowPartitionTest, RejectsInvalidOffsets) {
  for (Placement placement :
       {Placement::kDiv, Placement::kMod, Placement::kOffsets}) {
    EXPECT_NE(ErrorMessage(placement, {}).find("num_shards + 1"),
              std::string::npos);
    EXPECT_NE(ErrorMessage(placement, {0}).find("num_shards + 1"),
              std::string::npos);
    EXPECT_NE(ErrorMessage(placement, {1, 2}).find("start with 0"),
              std::string::npos);
    EXPECT_NE(ErrorMessage(placement, {0, 4, 3}).find("not decrease"),
              std::string::npos);
    EXPECT_NE(ErrorMessage(placement, {0, -1}).find("not decrease"),
              std::string::npos);
    EXPECT_NE(ErrorMessage(placement, {0, INT64_MIN}).find("not decrease"),
              std::string::npos);
    EXPECT_NE(ErrorMessage(placement, {0, kTwo32 + 1}).find("at most 2^32"),
              std::string::npos);
    EXPECT_NE(ErrorMessage(placement, {0, INT64_MAX}).find("at most 2^32"),
              std::string::npos);
    EXPECT_NE(ErrorMessage(placement, {0, INT64_MAX, 4}), "");
    EXPECT_NE(ErrorMessage(placement, {0, INT64_MIN, 4}), "");
  }
}

TEST(RowPartitionTest, RejectsUnevenOffsetsForEvenPlacements) {
  const std::vector<int64_t> short_first = {0, 2, 5};
  for (Placement placement : {Placement::kDiv, Placement::kMod}) {
    const std::string message = ErrorMessage(placement, short_first);
    EXPECT_NE(message.find("shard 1 starts at 2, expected 3"),
              std::string::npos)
        << message;
  }
  EXPECT_EQ(MakePartition(Placement::kOffsets, short_first).shard_size(0), 2);
}

TEST(RowPartitionTest, PlacementsAreParsedByName) {
  Placement placement;
  EXPECT_TRUE(ParsePlacement("div", &placement).ok());
  EXPECT_EQ(placement, Placement::kDiv);
  EXPECT_TRUE(ParsePlacement("mod", &placement).ok());
  EXPECT_EQ(placement, Placement::kMod);
  EXPECT_TRUE(ParsePlacement("offsets", &placement).ok());
  EXPECT_EQ(placement, Placement::kOffsets);
  const Status status = ParsePlacement("modulo", &placement);
  EXPECT_EQ(status.message(),
            "`placement` must be one of div, mod, offsets. Received: modulo");
}

template <typename Tid>
void ExpectIdIsRejected(Tid id) {
  const RowPartition partition =
      MakePartition(Placement::kDiv, EvenOffsets(5, 2));
  const std::vector<Tid> ids = {0, 4, id};
  std::vector<int32_t> shards(3);
  std::vector<Tid> local_rows(3);
  const Status status =
      AssignPartition<Tid>(partition, ids, shards, local_rows);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_EQ(status.message(), "Id " + std::to_string(id) +
                                  " (ids[2]) is outside the table with 5 rows");
}

TEST(AssignPartitionTest, RejectsIdsOutsideTheTable) {
  ExpectIdIsRejected<int32_t>(-1);
  ExpectIdIsRejected<int32_t>(5);
  ExpectIdIsRejected<int32_t>(INT32_MIN);
  ExpectIdIsRejected<int64_t>(-1);
  ExpectIdIsRejected<int64_t>(5);
  ExpectIdIsRejected<int64_t>(kTwo32);
  ExpectIdIsRejected<int64_t>(INT64_MAX);
  ExpectIdIsRejected<int64_t>(INT64_MIN);
}

TEST(AssignPartitionTest, ResultsAreInIdOrder) {
  const RowPartition partition =
      MakePartition(Placement::kMod, EvenOffsets(7, 3));
  const std::vector<int32_t> ids = {6, 0, 5, 6};
  std::vector<int32_t> shards(4), local_rows(4);
  ASSERT_TRUE(
      AssignPartition<int32_t>(partition, ids, shards, local_rows).ok());
  EXPECT_EQ(shards, (std::vector<int32_t>{0, 0, 2, 0}));
  EXPECT_EQ(local_rows, (std::vector<int32_t>{2, 0, 1, 2}));
}

}  // namespace
}  // namespace layoutmap
