// Tests the three steps that prepare ids for SparseCores. Python tests compare
// random batches with TensorFlow's kernels.

#include <cstdint>
#include <string>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/combiner.h"
#include "cc/emulation/sparse_core/coo_ids.h"
#include "cc/emulation/sparse_core/id_buffers.h"
#include "cc/emulation/sparse_core/sorted_ids.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

using Ints = std::vector<int32_t>;
using Floats = std::vector<float>;

void ExpectError(const Status& status, const std::string& words) {
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find(words), std::string::npos)
      << status.message();
}

// Two SparseCores per chip, on two chips. The table is the second of a stack.
CooSettings MakeSettings(Combiner combiner) {
  CooSettings settings;
  settings.sample_count = 4;
  settings.num_cores = 2;
  settings.row_offset = 8;
  settings.col_offset = 32;
  settings.col_shift = 2;
  settings.num_shards = 4;
  settings.stacked_sample_count = 12;
  settings.combiner = combiner;
  return settings;
}

TEST(SparseCoreHostOpsTest, IdsAreSplitByTheCoreOfTheirSample) {
  const Ints splits = {0, 3, 3, 3, 4};
  const Ints ids = {5, 5, 3, 5};
  const Floats weights = {1.0f, 2.0f, 1.0f, 3.0f};
  CooInput input;
  input.locations = splits;
  input.ids = ids;
  input.weights = weights;
  std::vector<CooIds> cores;
  ASSERT_TRUE(ConvertToCoo(MakeSettings(Combiner::kMean), input, &cores).ok());
  ASSERT_EQ(cores.size(), 2u);
  // Row 5 is in shard 1, which the rotation moves to shard 3.
  EXPECT_EQ(cores[0].cols, (Ints{32 + 7, 32 + 1}));
  EXPECT_EQ(cores[0].rows, (Ints{4, 4}));
  EXPECT_EQ(cores[0].gains, (Floats{0.75f, 0.25f}));
  EXPECT_EQ(cores[1].cols, (Ints{32 + 7}));
  // The first sample of the core is 6, and the sample is the second one.
  EXPECT_EQ(cores[1].rows, (Ints{6 + 4 + 1}));
  EXPECT_EQ(cores[1].gains, (Floats{1.0f}));
}

TEST(SparseCoreHostOpsTest, InvalidLocationsAreErrors) {
  std::vector<CooIds> cores;
  const Ints ids = {1, 2};
  const Floats weight = {1.0f};
  CooInput input;
  input.ids = ids;
  input.weights = weight;
  const CooSettings settings = MakeSettings(Combiner::kSum);
  ExpectError(ConvertToCoo(settings, input, &cores), "Dense tensor input");
  const Ints descending = {0, 2, 1, 2, 2};
  input.locations = descending;
  ExpectError(ConvertToCoo(settings, input, &cores), "must ascend");
  const Ints negative = {-1, 0, 0, 0};
  input.locations = negative;
  input.is_sparse = true;
  input.num_columns = 2;
  ExpectError(ConvertToCoo(settings, input, &cores), "need to be sorted");
  CooSettings uneven = settings;
  uneven.sample_count = 5;
  ExpectError(CheckCooSettings(uneven), "not divisible");
}

TEST(SparseCoreHostOpsTest, EqualIdsOfASampleAreMergedInTheirTable) {
  const Ints rows = {0, 1, 0};
  const Ints cols = {4, 4, 4};
  const Floats gains = {1.0f, 2.0f, 4.0f};
  const CoreFeature first = {rows, cols, gains, 0};
  const CoreFeature other_table = {rows, cols, gains, 8};
  SortSettings settings;
  settings.num_shards = 4;
  settings.samples_per_core = 2;
  settings.max_ids = 6;
  settings.max_unique_ids = 2;
  settings.table = "ads";
  SortedIds sorted;
  // Sample 1 is between the two occurrences in sample 0, which are not merged.
  ASSERT_TRUE(SortIds({other_table, first}, settings, &sorted).ok());
  EXPECT_EQ(sorted.counts, (Ints{0, 6, 6, 6, 6}));
  EXPECT_EQ(sorted.cols, (Ints{1, 1, 1, 1, 1, 1}));
  const Ints merged_rows = {0, 0, 1};
  ASSERT_TRUE(SortIds({{merged_rows, cols, gains, 0}}, settings, &sorted).ok());
  EXPECT_EQ(sorted.rows, (Ints{0, 1}));
  EXPECT_EQ(sorted.gains, (Floats{3.0f, 4.0f}));
  settings.max_ids = 5;
  ExpectError(SortIds({other_table, first}, settings, &sorted),
              "Sparse core 0 gets 6 ids while the max ids per sparse core is "
              "set to be 5 for table ads");
  int32_t max_ids;
  int32_t max_unique_ids;
  ASSERT_TRUE(
      CountIds({other_table, first}, 4, &max_ids, &max_unique_ids).ok());
  EXPECT_EQ(max_ids, 6);
  EXPECT_EQ(max_unique_ids, 2);
}

TEST(SparseCoreHostOpsTest, BuffersArePaddedForEachShard) {
  const Ints rows = {0, 1, 1};
  const Ints cols = {5, 6, 7};
  const Floats gains = {1.0f, 2.0f, 3.0f};
  const Ints counts = {0, 2, 3};
  BufferSettings settings;
  settings.num_shards = 2;
  settings.samples_per_core = 8;
  settings.max_ids_per_chip_per_sample = 2;
  BufferSizes sizes;
  ASSERT_TRUE(SizeOfBuffers(settings, 1, &sizes).ok());
  Ints pointers(sizes.num_row_pointers);
  Ints out_rows(sizes.num_ids);
  Ints out_cols(sizes.num_ids);
  Floats out_gains(sizes.num_ids);
  IdBuffers buffers;
  buffers.row_pointers = pointers;
  buffers.rows = out_rows;
  buffers.cols = out_cols;
  buffers.gains = out_gains;
  const CoreIds core = {rows, cols, gains, counts};
  ASSERT_TRUE(FillBuffers(settings, 0, {core}, &buffers).ok());
  EXPECT_EQ(pointers, (Ints{2, 9, 16, 16, 16, 16, 16, 16}));
  EXPECT_EQ(out_cols[1], 6);
  EXPECT_EQ(out_cols[2], kSparseCorePadding);
  EXPECT_EQ(out_cols[8], 7);
  EXPECT_EQ(buffers.ids_unpadded_size, 16);
  // Half of the buffer is too small for the second shard.
  buffers.rows = {out_rows.data(), 8};
  buffers.cols = {out_cols.data(), 8};
  buffers.gains = {out_gains.data(), 8};
  ExpectError(FillBuffers(settings, 0, {core}, &buffers),
              "The remaining id count is 1 .");
  settings.allow_id_dropping = true;
  ASSERT_TRUE(FillBuffers(settings, 0, {core}, &buffers).ok());
  EXPECT_EQ(buffers.num_dropped_ids, 1);
}

}  // namespace
}  // namespace layoutmap
