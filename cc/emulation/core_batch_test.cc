#include "cc/emulation/core_batch.h"

#include <cstdint>
#include <string>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/ids/combiner.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/emulation/config/config_test.h"
#include "cc/emulation/config/tpu_config.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

// Returns a configuration with one feature for each activation shape. The table
// has 10 rows.
TpuConfig MakeConfig(const std::vector<std::vector<int64_t>>& shapes) {
  WireWriter config = WriteSystem(1, 1);
  config.Message(1, WriteTable("ads", 10, 2, 1, kSgdField));
  for (const auto& shape : shapes) {
    config.Message(10, WriteFeature("shown", 0, shape));
  }
  TpuConfig parsed;
  const auto* bytes = reinterpret_cast<const uint8_t*>(config.bytes.data());
  EXPECT_TRUE(ParseTpuConfig({bytes, static_cast<int64_t>(config.bytes.size())},
                             &parsed)
                  .ok());
  return parsed;
}

struct Input {
  int64_t num_columns;
  std::vector<int64_t> locations;
  std::vector<int64_t> ids;
  std::vector<float> weights;
};

Status Make(const std::vector<int64_t>& shape, const Input& from,
            RaggedIds* ids, Combiner combiner = Combiner::kSum) {
  const TpuConfig config = MakeConfig({shape});
  CoreInput<int64_t> input;
  input.num_columns = from.num_columns;
  input.locations = from.locations;
  input.ids = from.ids;
  input.weights = from.weights;
  return MakeCoreIds(config, 0, combiner, input, ids);
}

void ExpectIds(const std::vector<int64_t>& shape, const Input& input,
               const std::vector<int64_t>& splits,
               const std::vector<uint32_t>& rows) {
  RaggedIds ids;
  const Status status = Make(shape, input, &ids);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(std::vector<int64_t>(ids.splits().begin(), ids.splits().end()),
            splits);
  EXPECT_EQ(std::vector<uint32_t>(ids.rows().begin(), ids.rows().end()), rows);
}

void ExpectRefused(const std::vector<int64_t>& shape, const Input& input,
                   const std::string& words) {
  RaggedIds ids;
  const Status status = Make(shape, input, &ids);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find(words), std::string::npos)
      << status.message();
}

TEST(CoreBatchTest, SparseIdsAreCombinedAlongTheLastColumn) {
  ExpectIds({3}, {2, {0, 0, 0, 5, 2, 1}, {7, 8, 9}, {}}, {0, 2, 2, 3},
            {7, 8, 9});
  ExpectIds({2, 2}, {3, {0, 1, 0, 0, 1, 4, 1, 0, 0}, {7, 8, 9}, {}},
            {0, 0, 2, 3, 3}, {7, 8, 9});
}

TEST(CoreBatchTest, SparseSequencesAreTruncatedToTheirLength) {
  ExpectIds({2, 2}, {3, {0, 0, 0, 0, 2, 0, 1, 1, 0}, {7, 8, 9}, {}},
            {0, 1, 1, 1, 2}, {7, 9});
  ExpectIds({2, 2}, {2, {0, 0, 0, 2, 1, 1}, {7, 8, 9}, {}}, {0, 1, 1, 1, 2},
            {7, 9});
}

TEST(CoreBatchTest, RaggedRowsAreSamplesSequencesOrActivations) {
  ExpectIds({2}, {0, {0, 2, 3}, {7, 8, 9}, {}}, {0, 2, 3}, {7, 8, 9});
  ExpectIds({2, 2}, {0, {0, 3, 4}, {7, 8, 9, 1}, {}}, {0, 1, 2, 3, 3},
            {7, 8, 1});
  ExpectIds({2, 2}, {0, {0, 3, 4, 4, 4}, {7, 8, 9, 1}, {}}, {0, 3, 4, 4, 4},
            {7, 8, 9, 1});
}

TEST(CoreBatchTest, EachDenseIdIsOneActivation) {
  ExpectIds({3}, {0, {}, {7, 8, 9}, {}}, {0, 1, 2, 3}, {7, 8, 9});
  ExpectIds({1, 3}, {0, {}, {7, 8, 9}, {}}, {0, 1, 2, 3}, {7, 8, 9});
  ExpectRefused({3}, {0, {}, {7, 8}, {}}, "dense ids must be 3. Received: 2");
}

TEST(CoreBatchTest, WeightsBecomeGains) {
  RaggedIds ids;
  ASSERT_TRUE(Make({2}, {2, {0, 0, 0, 1, 1, 0}, {7, 8, 9}, {1, 3, 5}}, &ids,
                   Combiner::kMean)
                  .ok());
  EXPECT_EQ(std::vector<float>(ids.gains().begin(), ids.gains().end()),
            (std::vector<float>{0.25f, 0.75f, 1}));
}

TEST(CoreBatchTest, ErrorsNameTheWrongInput) {
  ExpectRefused(
      {2}, {2, {0, 0, 1, 0}, {7, 10}, {}},
      "Feature 'shown', sample 1: id 10 is outside table 'ads' with 10 rows");
  // Ids that are truncated from a sequence are also checked.
  ExpectRefused({2, 1}, {3, {0, 0, 0, 1, 4, 0}, {7, -1}, {}},
                "sample 1: id -1 is outside");
  ExpectRefused({2, 2}, {0, {0, 1, 2}, {7, 10}, {}}, "sample 1: id 10");
  ExpectRefused({2}, {2, {0, 0, 2, 0}, {7, 8}, {}}, "within its 2 samples");
  ExpectRefused({2}, {2, {1, 0, 0, 0}, {7, 8}, {}}, "must be in order");
  ExpectRefused({2}, {2, {1, 0}, {7, 8}, {}}, "one index per id");
  ExpectRefused({2}, {3, {1, 0, 0}, {7}, {}}, "one column for each");
  ExpectRefused({2}, {2, {1, 0}, {7}, {1, 2}},
                "weights must have one value per id");
  ExpectRefused({2}, {0, {0, 1}, {7}, {}}, "must have 2 rows. Received: 1");
  ExpectRefused({1}, {0, {}, {7}, {1}}, "not supported for dense ids");
}

}  // namespace
}  // namespace layoutmap
