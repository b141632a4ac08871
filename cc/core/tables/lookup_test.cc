#include "cc/core/tables/lookup.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/parallel_for_test.h"
#include "cc/core/base/row_ids.h"
#include "cc/core/base/views.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/tables/table_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

struct Ids {
  std::vector<uint32_t> rows;
  std::vector<int64_t> splits{0};
  std::vector<float> gains;
};

// Returns random ids for samples with the given numbers of ids.
Ids RandomIds(const std::vector<int64_t>& sizes, int64_t num_rows,
              uint32_t seed) {
  std::mt19937 random(seed);
  Ids ids;
  for (int64_t size : sizes) {
    for (int64_t i = 0; i < size; ++i) {
      ids.rows.push_back(random() % num_rows);
      ids.gains.push_back(RandomFloat(&random));
    }
    ids.splits.push_back(ids.rows.size());
  }
  return ids;
}

// Computes the expected result column by column, in id order.
std::vector<float> ReferenceLookup(TestTable* table, const Ids& ids,
                                   bool with_gains) {
  std::vector<float> out;
  for (size_t o = 0; o + 1 < ids.splits.size(); ++o) {
    for (int64_t c = 0; c < table->dim(); ++c) {
      float sum = 0;
      for (int64_t i = ids.splits[o]; i < ids.splits[o + 1]; ++i) {
        const float value = table->row(ids.rows[i])[c];
        sum += with_gains ? ids.gains[i] * value : value;
      }
      out.push_back(sum);
    }
  }
  return out;
}

std::vector<float> RunLookup(const TestTable& table, const Ids& ids,
                             bool with_gains, CpuLevel level,
                             const ParallelFor& parallel_for) {
  const int64_t num_outputs = ids.splits.size() - 1;
  // Lookup must overwrite the initial values.
  std::vector<float> out(num_outputs * table.dim(), -7.0f);
  Lookup(table.View(), ids.rows, ids.splits,
         with_gains ? Span<const float>(ids.gains) : Span<const float>(),
         RowKernelsFor(level), parallel_for,
         {out.data(), num_outputs, table.dim()});
  return out;
}

void ExpectBitwiseEqual(const std::vector<float>& actual,
                        const std::vector<float>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  if (actual.empty()) return;
  ASSERT_EQ(std::memcmp(actual.data(), expected.data(),
                        actual.size() * sizeof(float)),
            0);
}

// Compares lookups with the reference for all levels that this CPU supports,
// with and without gains, and for 1, 2 and 8 workers.
void ExpectMatchesReference(TestTable* table, const Ids& ids) {
  for (bool with_gains : {false, true}) {
    const std::vector<float> expected = ReferenceLookup(table, ids, with_gains);
    for (CpuLevel level : LevelsOfThisCpu()) {
      for (int num_workers : {1, 2, 8}) {
        SCOPED_TRACE(testing::Message()
                     << "dim " << table->dim() << ", " << CpuLevelName(level)
                     << ", " << num_workers << " workers, gains "
                     << with_gains);
        ExpectBitwiseEqual(RunLookup(*table, ids, with_gains, level,
                                     UnevenFor(num_workers, table->dim())),
                           expected);
      }
    }
  }
}

TEST(LookupTest, ResultsAreBitwiseIdenticalForEveryDimLevelAndNumberOfWorkers) {
  for (int64_t dim = 1; dim <= 130; ++dim) {
    TestTable table(MakePartition(Placement::kDiv, EvenOffsets(23, 3)), dim,
                    dim);
    ExpectMatchesReference(
        &table, RandomIds({3, 0, 1, 7, 0, 0, 2, 25, 1}, 23, dim + 1000));
  }
}

TEST(LookupTest, EveryPlacementLooksUpTheRightRows) {
  const std::vector<int64_t> sizes = {5, 1, 0, 9, 2};
  for (int64_t num_shards : {1, 2, 5, 30}) {
    for (Placement placement : {Placement::kDiv, Placement::kMod}) {
      TestTable table(MakePartition(placement, EvenOffsets(17, num_shards)), 5,
                      num_shards);
      ExpectMatchesReference(&table, RandomIds(sizes, 17, num_shards));
    }
  }
  TestTable table(MakePartition(Placement::kOffsets, {0, 0, 4, 4, 16, 17, 17}),
                  5, 77);
  ExpectMatchesReference(&table, RandomIds(sizes, 17, 78));
}

TEST(LookupTest, IdsCanHaveAnyIntegerType) {
  for (int64_t num_shards : {1, 3}) {
    for (int64_t dim : {1, 8, 24, 64, 300}) {
      TestTable table(
          MakePartition(Placement::kDiv, EvenOffsets(50, num_shards)), dim,
          dim);
      const Ids ids = RandomIds({0, 3, 70, 1, 1, 0, 45}, 50, 7);
      const std::vector<int32_t> narrow(ids.rows.begin(), ids.rows.end());
      const std::vector<int64_t> wide(ids.rows.begin(), ids.rows.end());
      const std::vector<float> expected = ReferenceLookup(&table, ids, true);
      const int64_t num_outputs = ids.splits.size() - 1;
      for (CpuLevel level : LevelsOfThisCpu()) {
        for (const RowIds& rows :
             {RowIds(ids.rows), RowIds(Span<const int32_t>(narrow)),
              RowIds(Span<const int64_t>(wide))}) {
          std::vector<float> out(num_outputs * dim, -7.0f);
          Lookup(table.View(), rows, ids.splits, ids.gains,
                 RowKernelsFor(level), UnevenFor(2, dim),
                 {out.data(), num_outputs, dim});
          ExpectBitwiseEqual(out, expected);
        }
      }
    }
  }
}

TEST(LookupTest, OutputGainEqualsTheSameGainOfEachId) {
  for (int64_t num_shards : {1, 3}) {
    TestTable table(MakePartition(Placement::kDiv, EvenOffsets(50, num_shards)),
                    43, 1);
    Ids ids = RandomIds({0, 3, 70, 1, 1, 0, 45}, 50, 7);
    std::vector<float> output_gains;
    for (size_t o = 0; o + 1 < ids.splits.size(); ++o) {
      output_gains.push_back(0.3f * o - 0.7f);
      std::fill(ids.gains.begin() + ids.splits[o],
                ids.gains.begin() + ids.splits[o + 1], output_gains.back());
    }
    const ShardedView<const float> view = table.View();
    for (CpuLevel level : LevelsOfThisCpu()) {
      std::vector<float> out(output_gains.size() * table.dim(), -7.0f);
      LookupTask task;
      task.table = &view;
      task.rows = ids.rows;
      task.splits = ids.splits;
      task.output_gains = output_gains;
      task.out = {out.data(), static_cast<int64_t>(output_gains.size()),
                  table.dim()};
      LookupAll({task}, RowKernelsFor(level), UnevenFor(3, 1));
      ExpectBitwiseEqual(out, ReferenceLookup(&table, ids, true));
    }
  }
}

TEST(LookupTest, OutputsWithEqualNumbersOfIdsNeedNoSplits) {
  for (int64_t size : {0, 1, 2, 45, 100}) {
    for (int64_t dim : {1, 8, 24, 300}) {
      TestTable table(MakePartition(Placement::kDiv, EvenOffsets(50, 1)), dim,
                      dim);
      const int64_t num_outputs = 61;
      const Ids ids = RandomIds(std::vector<int64_t>(num_outputs, size), 50, 7);
      const std::vector<float> expected = ReferenceLookup(&table, ids, false);
      // The ids of an output follow two other numbers.
      std::vector<int64_t> matrix;
      for (int64_t o = 0; o < num_outputs; ++o) {
        matrix.insert(matrix.end(), {-1, -2});
        matrix.insert(matrix.end(), ids.rows.begin() + o * size,
                      ids.rows.begin() + (o + 1) * size);
      }
      const ShardedView<const float> view = table.View();
      for (CpuLevel level : LevelsOfThisCpu()) {
        std::vector<float> out(num_outputs * dim, -7.0f);
        LookupTask task;
        task.table = &view;
        task.rows = Span<const int64_t>(matrix);
        task.even = {2, 2 + size, size};
        task.out = {out.data(), num_outputs, dim};
        LookupAll({task}, RowKernelsFor(level), UnevenFor(3, 1));
        ExpectBitwiseEqual(out, expected);
      }
    }
  }
}

TEST(LookupTest, LongAndShortSamplesCanBeMixed) {
  std::vector<int64_t> sizes(700, 1);
  // This sample has more ids than a tile.
  sizes[3] = 5000;
  sizes[4] = 0;
  sizes[100] = 512;
  sizes[101] = 511;
  sizes[102] = 513;
  sizes.back() = 1500;
  for (int64_t dim : {1, 16, 67}) {
    TestTable table(MakePartition(Placement::kMod, EvenOffsets(301, 4)), dim,
                    dim);
    ExpectMatchesReference(&table, RandomIds(sizes, 301, dim));
  }
}

TEST(LookupTest, EmptySamplesBecomeZerosAndEmptyBatchesAreValid) {
  TestTable table(MakePartition(Placement::kDiv, EvenOffsets(0, 2)), 3, 1);
  ExpectMatchesReference(&table, Ids());
  ExpectMatchesReference(&table, RandomIds({0, 0, 0}, 1, 1));
  EXPECT_EQ(RunLookup(table, RandomIds({0, 0}, 1, 1), true, CurrentCpuLevel(),
                      SerialFor),
            std::vector<float>(6, 0.0f));
}

TEST(LookupTest, ExtremeFloatsAreLookedUpUnchanged) {
  TestTable table(MakePartition(Placement::kDiv, EvenOffsets(4, 2)), 19, 1);
  for (int64_t c = 0; c < 19; ++c) {
    table.row(0)[c] = 1e-41f;  // A subnormal value.
    table.row(1)[c] = -0.0f;
    table.row(2)[c] = 3e38f;
    table.row(3)[c] = -1e-40f;
  }
  Ids ids;
  ids.rows = {0, 3, 1, 2, 2, 2, 1};
  ids.splits = {0, 2, 3, 5, 7};
  ids.gains = {1, 0.5, 2, 1, -1, 0, 1};
  ExpectMatchesReference(&table, ids);
}

}  // namespace
}  // namespace layoutmap
