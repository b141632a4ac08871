#include "cc/core/rows/route.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "cc/core/base/parallel_for_test.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/tables/table_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

// Computes the expected route with one list of ids per shard.
template <typename Tid>
Route<Tid> ReferenceRoute(const RowPartition& partition,
                          const std::vector<Tid>& ids, bool unique) {
  std::vector<std::vector<int32_t>> places(partition.num_shards());
  std::map<Tid, int32_t> first;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (unique && !first.emplace(ids[i], i).second) continue;
    places[partition.Locate(ids[i]).shard].push_back(i);
  }
  Route<Tid> route;
  route.splits = {0};
  route.inverse.resize(ids.size());
  for (std::vector<int32_t>& shard : places) {
    if (unique) {
      std::sort(shard.begin(), shard.end(),
                [&](int32_t a, int32_t b) { return ids[a] < ids[b]; });
    }
    for (int32_t place : shard) {
      for (size_t i = 0; i < ids.size(); ++i) {
        const bool is_owned =
            unique ? ids[i] == ids[place] : static_cast<int32_t>(i) == place;
        if (is_owned) route.inverse[i] = route.permutation.size();
      }
      route.permutation.push_back(place);
      route.local_rows.push_back(partition.Locate(ids[place]).local_row);
    }
    route.splits.push_back(route.permutation.size());
  }
  return route;
}

template <typename Tid>
void ExpectMatchesReference(const RowPartition& partition,
                            const std::vector<Tid>& ids, bool unique) {
  Route<Tid> route;
  const Status status =
      RouteIds<Tid>(partition, Span<const Tid>(ids), unique, &route);
  ASSERT_TRUE(status.ok()) << status.message();
  const Route<Tid> expected = ReferenceRoute(partition, ids, unique);
  ASSERT_EQ(route.local_rows, expected.local_rows);
  ASSERT_EQ(route.splits, expected.splits);
  ASSERT_EQ(route.permutation, expected.permutation);
  ASSERT_EQ(route.inverse, expected.inverse);
}

template <typename Tid>
void ExpectRandomIdsMatchReference(uint32_t seed) {
  std::mt19937 random(seed);
  for (int round = 0; round < 400; ++round) {
    const Placement placement = static_cast<Placement>(random() % 3);
    const int64_t num_shards = 1 + random() % 9;
    std::vector<int64_t> offsets = EvenOffsets(1 + random() % 30, num_shards);
    if (placement == Placement::kOffsets) {
      offsets = {0};
      for (int64_t s = 0; s < num_shards; ++s) {
        offsets.push_back(offsets.back() + random() % 5);
      }
    }
    const RowPartition partition = MakePartition(placement, offsets);
    std::vector<Tid> ids(partition.num_rows() == 0 ? 0 : random() % 40);
    for (Tid& id : ids) id = random() % partition.num_rows();
    ExpectMatchesReference<Tid>(partition, ids, false);
    ExpectMatchesReference<Tid>(partition, ids, true);
  }
}

TEST(RouteTest, MatchesOneListPerShard) {
  ExpectRandomIdsMatchReference<int32_t>(1);
  ExpectRandomIdsMatchReference<int64_t>(2);
}

// The test uses enough ids for several chunks.
TEST(RouteTest, ManyIdsKeepTheirOrderForAnyNumberOfWorkers) {
  std::mt19937 random(3);
  for (int64_t num_ids : {8191, 8192, 16384, 100000, 200001}) {
    for (int64_t num_shards : {1, 3, 64}) {
      const RowPartition partition =
          MakePartition(Placement::kMod, EvenOffsets(977, num_shards));
      std::vector<int64_t> ids(num_ids);
      for (int64_t& id : ids) id = random() % 977;
      // Each list contains the positions of a shard's ids in id order.
      std::vector<std::vector<int32_t>> places(num_shards);
      for (int64_t i = 0; i < num_ids; ++i) {
        places[partition.Locate(ids[i]).shard].push_back(i);
      }
      for (int num_workers : {1, 2, 8}) {
        std::vector<int64_t> local_rows(num_ids), splits(num_shards + 1);
        std::vector<int32_t> permutation(num_ids), inverse(num_ids);
        ASSERT_TRUE(
            RouteEachId<int64_t>(partition, Span<const int64_t>(ids),
                                 UnevenFor(num_workers, num_ids),
                                 {local_rows, splits, permutation, inverse})
                .ok());
        int64_t slot = 0;
        for (int64_t s = 0; s < num_shards; ++s) {
          ASSERT_EQ(splits[s], slot);
          for (int32_t place : places[s]) {
            ASSERT_EQ(permutation[slot], place);
            ASSERT_EQ(inverse[place], slot);
            ASSERT_EQ(local_rows[slot], partition.Locate(ids[place]).local_row);
            ++slot;
          }
        }
        ASSERT_EQ(splits[num_shards], num_ids);

        std::vector<int64_t> only_rows(num_ids);
        std::vector<int32_t> only_permutation(num_ids);
        ASSERT_TRUE(
            RouteEachId<int64_t>(partition, Span<const int64_t>(ids),
                                 UnevenFor(num_workers, num_ids),
                                 {only_rows, splits, only_permutation, {}})
                .ok());
        ASSERT_EQ(only_rows, local_rows);
        ASSERT_EQ(only_permutation, permutation);
      }
    }
  }
}

TEST(RouteTest, OneInvalidIdAmongManyIsReportedWithItsIndex) {
  const RowPartition partition =
      MakePartition(Placement::kDiv, EvenOffsets(100, 4));
  std::vector<int64_t> ids(50000, 99);
  ids[41234] = 100;
  ids[49999] = -1;
  Route<int64_t> route;
  EXPECT_EQ(
      RouteIds<int64_t>(partition, Span<const int64_t>(ids), false, &route)
          .message(),
      "Id 100 (ids[41234]) is outside the table with 100 rows");
}

TEST(RouteTest, RoutesTheLastRowOfTheLargestTable) {
  const int64_t num_rows = int64_t{1} << 32;
  for (Placement placement : {Placement::kDiv, Placement::kMod}) {
    const RowPartition partition =
        MakePartition(placement, EvenOffsets(num_rows, 3));
    ExpectMatchesReference<int64_t>(
        partition, {num_rows - 1, 0, num_rows / 3, num_rows - 1}, true);
    ExpectMatchesReference<int64_t>(
        partition, {num_rows - 1, 0, num_rows / 3, num_rows - 1}, false);
  }
}

TEST(RouteTest, RejectsAllIdsIfOneIsOutside) {
  const RowPartition partition =
      MakePartition(Placement::kMod, EvenOffsets(5, 2));
  for (bool unique : {false, true}) {
    for (int64_t id : {int64_t{-1}, int64_t{5}, INT64_MIN, INT64_MAX}) {
      const std::vector<int64_t> ids = {4, id, 0};
      Route<int64_t> route;
      const Status status = RouteIds<int64_t>(
          partition, Span<const int64_t>(ids), unique, &route);
      EXPECT_EQ(status.code(), Code::kInvalidArgument);
      EXPECT_EQ(status.message(),
                "Id " + std::to_string(id) +
                    " (ids[1]) is outside the table with 5 rows");
    }
  }
}

TEST(RouteTest, ATableWithoutRowsIsValidAndRejectsEveryId) {
  const RowPartition partition =
      MakePartition(Placement::kDiv, EvenOffsets(0, 3));
  ExpectMatchesReference<int32_t>(partition, {}, false);
  ExpectMatchesReference<int32_t>(partition, {}, true);
}

}  // namespace
}  // namespace layoutmap
