#include "cc/core/steps/step.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/parallel_for_test.h"
#include "cc/core/ids/combiner.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/rows/unique_rows.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/tables/table_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

using Batches = std::vector<std::shared_ptr<const Batch>>;

// Returns a configuration with two tables. The first table has two features,
// and the second table has one feature.
EngineConfig Config(Combiner combiner) {
  EngineConfig config;
  config.num_replicas = 2;
  config.tables.resize(2);
  for (TableSpec& table : config.tables) {
    table.partition = MakePartition(Placement::kDiv, EvenOffsets(5000, 2));
    table.dim = 1;
  }
  config.table_of_feature = {0, 1, 0};
  config.features.resize(3);
  for (FeatureSpec& feature : config.features) {
    feature.num_rows = 5000;
    feature.combiner = combiner;
  }
  return config;
}

// Returns batches with `num_ids` ids for each feature of each replica. Each
// sample has at most `most` ids.
Batches RandomBatches(const EngineConfig& config, int64_t num_ids, int64_t most,
                      uint32_t seed) {
  std::mt19937 random(seed);
  Batches batches;
  for (int32_t replica = 0; replica < config.num_replicas; ++replica) {
    auto batch = std::make_shared<Batch>(config.features.size());
    for (size_t f = 0; f < batch->size(); ++f) {
      std::vector<int64_t> ids(num_ids), splits = {0};
      for (int64_t& id : ids) id = random() % config.features[f].num_rows;
      while (splits.back() < num_ids) {
        const int64_t size = most == 1 ? 1 : random() % (most + 1);
        splits.push_back(std::min(splits.back() + size, num_ids));
      }
      FeatureInput<int64_t> input;
      input.ids = ids;
      input.splits = splits;
      input.num_samples = static_cast<int64_t>(splits.size()) - 1;
      EXPECT_TRUE(
          RaggedIds::Make(config.features[f], input, &(*batch)[f]).ok());
    }
    batches.push_back(std::move(batch));
  }
  return batches;
}

void ExpectMatchesReference(const EngineConfig& config, const Batches& batches,
                            const std::vector<TableStep>& tables) {
  ASSERT_EQ(tables.size(), config.tables.size());
  for (size_t t = 0; t < tables.size(); ++t) {
    std::map<uint32_t, std::vector<std::pair<uint32_t, float>>> of_row;
    uint32_t output = 0;
    for (size_t f = 0; f < config.features.size(); ++f) {
      if (config.table_of_feature[f] != static_cast<int32_t>(t)) continue;
      for (const auto& batch : batches) {
        const RaggedIds& ids = (*batch)[f];
        for (int64_t o = 0; o < ids.num_outputs(); ++o, ++output) {
          for (int64_t i = ids.splits()[o]; i < ids.splits()[o + 1]; ++i) {
            of_row[ids.rows()[i]].push_back(
                {output, ids.gains().empty() ? 1.0f : ids.gains()[i]});
          }
        }
      }
    }
    const TableStep& table = tables[t];
    ASSERT_EQ(table.rows.size(), of_row.size());
    size_t u = 0, k = 0;
    for (const auto& [row, positions] : of_row) {
      ASSERT_EQ(table.rows[u], row);
      ASSERT_EQ(table.splits[u++], static_cast<int64_t>(k));
      for (const auto& [gradient, gain] : positions) {
        ASSERT_EQ(table.gradient_of[k], gradient);
        ASSERT_EQ(table.gains.empty() ? 1.0f : table.gains[k], gain);
        ++k;
      }
    }
    ASSERT_EQ(table.splits[u], static_cast<int64_t>(k));
    ASSERT_EQ(table.gradient_of.size(), k);
  }
}

TEST(PrepareTablesTest, PreparedTablesMatchTheReferenceForAllSizes) {
  for (Combiner combiner : {Combiner::kSum, Combiner::kMean}) {
    const EngineConfig config = Config(combiner);
    for (int64_t most : {1, 5}) {
      // The first table has two features in each of two replicas. With the last
      // value of `num_ids`, all threads share the sort for this table.
      for (int64_t num_ids : {int64_t{0}, int64_t{300}, kManyIds / 4 + 1}) {
        const Batches batches = RandomBatches(config, num_ids, most, 3);
        for (const ParallelFor& parallel_for :
             {ParallelFor(SerialFor), UnevenFor(3)}) {
          // PrepareTables must overwrite the existing values.
          std::vector<TableStep> tables(5);
          PrepareTables(config, batches, parallel_for, &tables);
          ExpectMatchesReference(config, batches, tables);
        }
      }
    }
  }
}

}  // namespace
}  // namespace layoutmap
