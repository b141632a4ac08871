#include "cc/core/tables/scatter.h"

#include <cstdint>
#include <random>
#include <vector>

#include "cc/core/base/parallel_for_test.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/check_ids.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/tables/gather.h"
#include "cc/core/tables/table_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

std::vector<int64_t> SkewedIds(int64_t num_ids, int64_t num_rows,
                               uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int64_t> ids(num_ids);
  for (int64_t& id : ids) {
    id = random() % 3 ? random() % num_rows : random() % 3;
  }
  return ids;
}

// Updates a row. If `last_wins` is false, the result of several updates depends
// on their order. If `last_wins` is true, the result depends only on the last
// update.
void Mix(float* row, const float* value, int64_t dim, bool last_wins) {
  for (int64_t c = 0; c < dim; ++c) {
    row[c] = (last_wins ? 0.0f : row[c] * 0.5f) + value[c];
  }
}

TEST(ScatterTest, EqualIdsAreAppliedInOrderForAnyNumberOfWorkers) {
  for (int64_t num_ids : {0, 1, 15, 16, 17, 511, 512, 513, 20000}) {
    for (int64_t num_shards : {1, 3, 40}) {
      const int64_t dim = 3;
      const RowPartition partition =
          MakePartition(Placement::kMod, EvenOffsets(301, num_shards));
      const std::vector<int64_t> ids = SkewedIds(num_ids, 301, num_ids);
      const std::vector<float> values = RandomFloats(num_ids * dim, 5);
      for (bool broadcast : {false, true}) {
        for (bool last_wins : {false, true}) {
          const std::vector<float> one = RandomFloats(dim, 6);
          const float* source = broadcast ? one.data() : values.data();
          TestTable expected(partition, dim, 1);
          for (int64_t i = 0; i < num_ids; ++i) {
            Mix(expected.row(ids[i]), source + (broadcast ? 0 : i * dim), dim,
                last_wins);
          }
          for (int num_workers : {1, 2, 8}) {
            TestTable table(partition, dim, 1);
            ScatterRows(
                table.MutableView(), Span<const int64_t>(ids), source,
                broadcast, last_wins,
                [&](float* row, const float* value) {
                  Mix(row, value, dim, last_wins);
                },
                num_workers, UnevenFor(num_workers, num_ids));
            ASSERT_EQ(table.shards(), expected.shards())
                << num_ids << " ids, " << num_shards << " shards, "
                << num_workers << " workers, last wins: " << last_wins;
          }
        }
      }
    }
  }
}

TEST(GatherTest, RowsAreGatheredInIdOrder) {
  for (int64_t num_ids : {0, 1, 15, 16, 17, 5000}) {
    for (int64_t dim : {1, 7, 200}) {
      TestTable table(MakePartition(Placement::kDiv, EvenOffsets(101, 4)), dim,
                      1);
      const std::vector<int64_t> ids = SkewedIds(num_ids, 101, 3);
      for (int num_workers : {1, 2, 8}) {
        std::vector<float> out(num_ids * dim);
        GatherRows(table.View(), Span<const int64_t>(ids),
                   UnevenFor(num_workers, dim), out.data());
        for (int64_t i = 0; i < num_ids; ++i) {
          for (int64_t c = 0; c < dim; ++c) {
            ASSERT_EQ(out[i * dim + c], table.row(ids[i])[c]);
          }
        }
      }
    }
  }
}

TEST(GatherTest, ReportsTheFirstIdOutsideTheTable) {
  const std::vector<int32_t> ids = {0, 4, -1, 5};
  EXPECT_EQ(CheckIds(Span<const int32_t>(ids), 5, "ads").message(),
            "Id -1 (ids[2]) is outside table 'ads' with 5 rows");
  EXPECT_TRUE(CheckIds(Span<const int32_t>(ids.data(), 2), 5, "ads").ok());
  EXPECT_FALSE(CheckIds(Span<const int32_t>(ids.data(), 1), 0, "ads").ok());
}

}  // namespace
}  // namespace layoutmap
