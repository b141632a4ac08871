// Tests that the contributions for all owners together equal the batch.

#include "cc/core/exchange/contributions.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cc/core/base/parallel_for_test.h"
#include "cc/core/engine/engine_test.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/servers/worker_step.h"
#include "cc/core/tables/table_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

std::shared_ptr<const ServersConfig> Config() {
  auto config = std::make_shared<ServersConfig>();
  config->engine = TestConfig(1);
  config->engine.tables[1].partition =
      MakePartition(Placement::kOffsets, {0, 3, 3, 7});
  config->num_servers = 3;
  config->server_of_shard = {0, 1, 0, 1, 2};
  return config;
}

// One id of a feature, in the form that is compared between a batch and its
// parts.
struct Id {
  uint32_t output;
  int64_t row;
  float gain;
  bool operator==(const Id& o) const {
    return output == o.output && row == o.row && gain == o.gain;
  }
};

TEST(ContributionsTest, PartsOfAllOwnersHoldEachIdOnceAndInOrder) {
  const auto config = Config();
  Trainer trainer(config->engine);
  for (uint32_t seed = 0; seed < 20; ++seed) {
    const auto batch =
        trainer.MakeBatch(RandomBatch(config->engine, seed % 7, seed));
    const auto step = WorkerStep::Make(config, batch, UnevenFor(2));
    const OwnedParts parts = SplitBatch(*step, UnevenFor(3));
    ASSERT_EQ(parts.size(), 3u);
    for (size_t f = 0; f < batch->size(); ++f) {
      const RaggedIds& ids = (*batch)[f];
      const int32_t table = config->engine.table_of_feature[f];
      const auto& offsets = config->engine.tables[table].partition.offsets();
      const int32_t* owners =
          config->server_of_shard.data() + (table == 0 ? 0 : 2);
      for (int32_t s = 0; s < 3; ++s) {
        std::vector<Id> expected, found;
        for (int64_t o = 0; o < ids.num_outputs(); ++o) {
          for (int64_t i = ids.splits()[o]; i < ids.splits()[o + 1]; ++i) {
            const int64_t row = ids.rows()[i];
            size_t shard = offsets.size() - 2;
            while (offsets[shard] > row) --shard;
            if (owners[shard] != s) continue;
            expected.push_back({static_cast<uint32_t>(o), row - offsets[shard],
                                ids.gains().empty() ? 1.0f : ids.gains()[i]});
          }
        }
        const OwnedPart& part = parts[s][f];
        size_t next = 0;
        for (size_t o = 0; o < part.outputs.size(); ++o) {
          for (uint32_t i = 0; i < part.counts[o]; ++i, ++next) {
            found.push_back({part.outputs[o], part.rows[next],
                             part.gains.empty() ? 1.0f : part.gains[next]});
          }
        }
        EXPECT_EQ(next, part.rows.size());
        EXPECT_TRUE(found == expected) << "feature " << f << ", owner " << s;
      }
    }
  }
}

TEST(ContributionsTest, WrittenPartsCanBeRead) {
  std::vector<OwnedPart> parts(3), found;
  parts[0] = {{1, 4}, {2, 1}, {7, 0, 3}, {0.5f, 0.5f, 1.0f}};
  parts[2] = {{0, 2}, {1, 1}, {5, 5}, {}};
  const std::vector<uint32_t> words = WriteParts(parts);
  ASSERT_TRUE(ReadParts(words, 3, &found).ok());
  for (size_t f = 0; f < parts.size(); ++f) {
    EXPECT_EQ(found[f].counts, parts[f].counts);
    EXPECT_EQ(found[f].rows, parts[f].rows);
    EXPECT_EQ(found[f].gains, parts[f].gains);
  }
}

TEST(ContributionsTest, ReadRejectsInvalidWords) {
  std::vector<OwnedPart> found;
  std::vector<OwnedPart> parts(1);
  parts[0] = {{0, 1}, {2, 1}, {7, 0, 3}, {}};
  const std::vector<uint32_t> valid = WriteParts(parts);
  const auto error_message = [&](std::vector<uint32_t> words) {
    return ReadParts(words, 1, &found).message();
  };
  EXPECT_EQ(error_message(valid), "");
  for (size_t size = 0; size < valid.size(); ++size) {
    const auto words =
        std::vector<uint32_t>(valid.begin(), valid.begin() + size);
    EXPECT_NE(error_message(words).find("Received"), std::string::npos);
  }
  std::vector<uint32_t> words = valid;
  words.push_back(0);
  EXPECT_NE(error_message(words).find("9 words"), std::string::npos);
  words = valid;
  words[3] = 9;  // Number of ids of the first output.
  EXPECT_NE(error_message(words).find("3 ids, but outputs with a total of 10"),
            std::string::npos);
}

TEST(ContributionsTest, EachOwnerReceivesTheGradientsOfItsOutputs) {
  const auto config = Config();
  Trainer trainer(config->engine);
  const auto batch = trainer.MakeBatch(RandomBatch(config->engine, 5, 3));
  const auto step = WorkerStep::Make(config, batch, SerialFor);
  Values gradients;
  for (size_t f = 0; f < batch->size(); ++f) {
    gradients.push_back(RandomFloats(
        (*batch)[f].num_outputs() * config->engine.dim_of_feature(f), f));
  }
  const BatchGradients given = Trainer::MakeGradients(gradients);
  std::vector<std::vector<float>> values;
  ASSERT_TRUE(SplitGradients(*step, given, SerialFor, &values).ok());
  const OwnedParts parts = SplitBatch(*step, SerialFor);
  for (size_t s = 0; s < parts.size(); ++s) {
    std::vector<float> expected;
    for (size_t f = 0; f < parts[s].size(); ++f) {
      const int64_t dim = config->engine.dim_of_feature(f);
      for (const uint32_t output : parts[s][f].outputs) {
        const auto row = gradients[f].begin() + output * dim;
        expected.insert(expected.end(), row, row + dim);
      }
    }
    EXPECT_EQ(values[s], expected);
  }
  gradients.pop_back();
  EXPECT_FALSE(SplitGradients(*step, Trainer::MakeGradients(gradients),
                              SerialFor, &values)
                   .ok());
}

}  // namespace
}  // namespace layoutmap
