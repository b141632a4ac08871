// Tests that the requests to all owners together contain the keys of a batch,
// and that the rows of the owners are placed in the batch.

#include "cc/core/exchange/key_requests.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for_test.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/combiner.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/served_keys/key_messages.h"
#include "cc/core/served_keys/key_step.h"
#include "cc/core/servers/worker_step.h"
#include "cc/core/steps/step.h"
#include "cc/core/tables/table_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

constexpr int64_t kBuckets = 32;
constexpr int64_t kNumRows = kBuckets * kKeysPerBucket;
// Three owners of `words`, in reverse order. `ads` has no keys.
const std::vector<int64_t> kOffsets = {0, 96, 192, kNumRows + 1};

std::shared_ptr<const KeysConfig> Config(bool has_unknown_row) {
  auto servers = std::make_shared<ServersConfig>();
  EngineConfig& engine = servers->engine;
  engine.tables.resize(2);
  engine.tables[0].name = "ads";
  engine.tables[0].partition = MakePartition(Placement::kOffsets, {0, 5});
  engine.tables[1].name = "words";
  engine.tables[1].partition = MakePartition(Placement::kOffsets, kOffsets);
  for (TableSpec& table : engine.tables) table.dim = 2;
  for (const char* name : {"title", "shown", "body"}) {
    FeatureSpec feature;
    const bool is_ad = std::string(name) == "shown";
    feature.feature = name;
    feature.table = is_ad ? "ads" : "words";
    feature.num_rows = is_ad ? 5 : kNumRows + 1;
    feature.combiner = Combiner::kMean;
    engine.features.push_back(feature);
    engine.table_of_feature.push_back(is_ad ? 0 : 1);
  }
  servers->num_servers = 3;
  servers->server_of_shard = {0, 2, 1, 0};
  std::vector<OpenTable> tables(2);
  tables[1].is_open = true;
  tables[1].has_unknown_row = has_unknown_row;
  KeysConfig config;
  const Status status =
      MakeKeysConfig(std::move(servers), std::move(tables), &config);
  EXPECT_TRUE(status.ok()) << status.message();
  return std::make_shared<const KeysConfig>(std::move(config));
}

class KeyRequestsTest : public testing::TestWithParam<bool> {
 protected:
  // Creates random inputs: few keys, so that keys occur several times.
  void Draw(uint32_t seed) {
    std::mt19937 random(seed);
    for (size_t f = 0; f < 3; ++f) {
      ids_[f].clear();
      splits_[f] = {0};
      for (int sample = 0; sample < 4; ++sample) {
        const auto size = static_cast<int64_t>(random() % 5);
        for (int64_t i = 0; i < size; ++i) {
          const auto id = static_cast<int64_t>(random());
          ids_[f].push_back(f == 1 ? id % 5 : id % 23 - 11);
        }
        splits_[f].push_back(static_cast<int64_t>(ids_[f].size()));
      }
    }
  }

  KeyRequests Make() {
    std::vector<FeatureInput<int64_t>> inputs(3);
    for (size_t f = 0; f < 3; ++f) {
      inputs[f].ids = ids_[f];
      inputs[f].splits = splits_[f];
      inputs[f].num_samples = 4;
    }
    KeyRequests requests;
    const Status status =
        KeyRequests::Make(config_, inputs, UnevenFor(2), &requests);
    EXPECT_TRUE(status.ok()) << status.message();
    return requests;
  }

  int32_t OwnerOf(int64_t key) const {
    const int64_t row = config_->tables[1].layout.BucketOf(key) * 8;
    return row < 96 ? 2 : row < 192 ? 1 : 0;
  }

  // Returns the row of a key in its shard. In the tests, keys that are
  // divisible by 3 have no row.
  static uint32_t PlaceOf(int64_t key) {
    return key % 3 == 0 ? kNoPlace : static_cast<uint32_t>(key + 11);
  }

  const std::shared_ptr<const KeysConfig> config_ = Config(GetParam());
  std::vector<int64_t> ids_[3];
  std::vector<int64_t> splits_[3];
};

TEST_P(KeyRequestsTest, ContainEachKeyOnceByFeatureAndOwner) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    Draw(seed);
    const KeyRequests requests = Make();
    const std::vector<std::vector<uint32_t>> words = requests.Write();
    const std::vector<int64_t> num_keys = requests.NumKeys();
    ASSERT_EQ(words.size(), 3u);
    for (int32_t s = 0; s < 3; ++s) {
      std::vector<PieceKeys> found;
      ASSERT_TRUE(ReadKeyRequest(words[s], 2, &found).ok());
      int64_t total = 0;
      for (size_t i = 0; i < 2; ++i) {
        std::vector<int64_t> keys;
        std::map<int64_t, uint32_t> times;
        for (const int64_t key : ids_[2 * i]) {
          if (OwnerOf(key) != s) continue;
          if (times[key]++ == 0) keys.push_back(key);
        }
        EXPECT_EQ(found[i].keys, keys);
        for (size_t k = 0; k < keys.size(); ++k) {
          EXPECT_EQ(found[i].times[k], times[keys[k]]);
        }
        total += static_cast<int64_t>(keys.size());
      }
      EXPECT_EQ(num_keys[s], total);
    }
  }
}

TEST_P(KeyRequestsTest, PlaceTheRowsOfAllOwners) {
  const int64_t first_rows[] = {192, 96, 0};
  for (uint32_t seed = 0; seed < 20; ++seed) {
    Draw(seed);
    const KeyRequests requests = Make();
    const std::vector<std::vector<uint32_t>> words = requests.Write();
    std::vector<std::vector<uint32_t>> rows(3);
    for (size_t s = 0; s < 3; ++s) {
      std::vector<PieceKeys> keys;
      ASSERT_TRUE(ReadKeyRequest(words[s], 2, &keys).ok());
      for (const PieceKeys& piece : keys) {
        for (const int64_t key : piece.keys) rows[s].push_back(PlaceOf(key));
      }
    }
    std::shared_ptr<const Batch> batch;
    ASSERT_TRUE(requests.Place({rows.begin(), rows.end()}, &batch).ok());
    for (const size_t f : {size_t{0}, size_t{2}}) {
      std::vector<uint32_t> expected;
      std::vector<float> gains;
      for (int64_t o = 0; o < 4; ++o) {
        const int64_t size = splits_[f][o + 1] - splits_[f][o];
        for (int64_t i = splits_[f][o]; i < splits_[f][o + 1]; ++i) {
          const int64_t key = ids_[f][i];
          if (PlaceOf(key) != kNoPlace) {
            expected.push_back(
                static_cast<uint32_t>(first_rows[OwnerOf(key)] + PlaceOf(key)));
          } else if (GetParam()) {
            expected.push_back(kNumRows);
          } else {
            continue;
          }
          // An unknown key counts in the divisor of the mean.
          gains.push_back(1.0f / static_cast<float>(size));
        }
      }
      const RaggedIds& ids = (*batch)[f];
      EXPECT_EQ(std::vector<uint32_t>(ids.rows().begin(), ids.rows().end()),
                expected);
      if (!ids.gains().empty()) {
        EXPECT_EQ(std::vector<float>(ids.gains().begin(), ids.gains().end()),
                  gains);
      }
    }
    const RaggedIds& shown = (*batch)[1];
    EXPECT_TRUE(std::equal(shown.rows().begin(), shown.rows().end(),
                           ids_[1].begin(), ids_[1].end()));
  }
}

TEST_P(KeyRequestsTest, WrongRowsAreRejected) {
  ids_[0] = {5};
  ids_[1] = {};
  ids_[2] = {};
  splits_[0] = {0, 1, 1, 1, 1};
  splits_[1] = splits_[2] = {0, 0, 0, 0, 0};
  const KeyRequests requests = Make();
  std::vector<std::vector<uint32_t>> rows(3);
  std::shared_ptr<const Batch> batch;
  Status status = requests.Place({rows.begin(), rows.end()}, &batch);
  EXPECT_NE(status.message().find("must have 1 rows. Received: 0"),
            std::string::npos)
      << status.message();
  rows[OwnerOf(5)] = {96};
  status = requests.Place({rows.begin(), rows.end()}, &batch);
  EXPECT_NE(status.message().find("rows of the requested shards"),
            std::string::npos)
      << status.message();
  status = requests.Place({}, &batch);
  EXPECT_NE(status.message().find("one tensor for each of 3 owners"),
            std::string::npos)
      << status.message();
}

INSTANTIATE_TEST_SUITE_P(UnknownRow, KeyRequestsTest, testing::Bool());

TEST(ReadKeyRequestTest, MalformedWordsAreRejected) {
  std::vector<PieceKeys> keys;
  EXPECT_TRUE(
      ReadKeyRequest(std::vector<uint32_t>{1, 1, 7, 0, 2}, 1, &keys).ok());
  EXPECT_EQ(keys[0].keys, (std::vector<int64_t>{7}));
  EXPECT_EQ(keys[0].times, (std::vector<uint32_t>{2}));
  const std::vector<std::vector<uint32_t>> malformed = {
      {},                        // No feature.
      {1},                       // No flags.
      {1, 0, 7},                 // Half a key.
      {1, 1, 7, 0},              // No number of uses.
      {1, 0, 7, 0, 1},           // A number of uses without the flag.
      {1, 1, 7, 0, 0},           // A key without uses.
      {1, 1, 7, 0, UINT32_MAX},  // More uses than a step can have.
      {UINT32_MAX, 1, 7, 0, 2},  // More keys than words.
  };
  for (const std::vector<uint32_t>& words : malformed) {
    EXPECT_FALSE(ReadKeyRequest(words, 1, &keys).ok()) << words.size();
  }
}

TEST(ExpandUsesTest, RepeatsEachKey) {
  EXPECT_EQ(ExpandUses({{7, -3}, {2, 1}}), (std::vector<int64_t>{7, 7, -3}));
  EXPECT_TRUE(ExpandUses({}).empty());
}

}  // namespace
}  // namespace layoutmap
