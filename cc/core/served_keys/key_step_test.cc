// Tests the worker side of a step on open vocabularies with simple test
// servers.

#include "cc/core/served_keys/key_step.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/parallel_for_test.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/combiner.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/served_keys/key_messages.h"
#include "cc/core/servers/messages.h"
#include "cc/core/servers/worker_step.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/tables/table_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

using Bytes = std::vector<uint8_t>;

constexpr int64_t kDim = 2;
constexpr int64_t kBuckets = 8;
constexpr int64_t kNumRows = kBuckets * kKeysPerBucket;
// The row offsets of `words` on two servers. The last row is the row for
// unknown keys. The table `ads` has 5 rows on the second server.
const std::vector<int64_t> kOffsets = {0, 24, kNumRows + 1};

// Returns the value that the tests store in a table element.
float ValueOf(int64_t row, int64_t column) {
  return static_cast<float>(10 * row + column + 1);
}

class KeyStepTest : public testing::TestWithParam<bool> {
 protected:
  KeyStepTest() {
    auto servers = std::make_shared<ServersConfig>();
    EngineConfig& engine = servers->engine;
    engine.tables.resize(2);
    engine.tables[0].name = "words";
    engine.tables[0].partition = MakePartition(Placement::kOffsets, kOffsets);
    engine.tables[1].name = "ads";
    engine.tables[1].partition = MakePartition(Placement::kOffsets, {0, 5});
    for (TableSpec& table : engine.tables) table.dim = kDim;
    for (const char* name : {"title", "shown", "body"}) {
      FeatureSpec feature;
      const bool is_ad = std::string(name) == "shown";
      feature.feature = name;
      feature.table = is_ad ? "ads" : "words";
      feature.num_rows = is_ad ? 5 : kNumRows + 1;
      feature.combiner = Combiner::kSum;
      engine.features.push_back(feature);
      engine.table_of_feature.push_back(is_ad ? 1 : 0);
    }
    servers->num_servers = 2;
    servers->server_of_shard = {0, 1, 1};
    std::vector<OpenTable> tables(2);
    tables[0].is_open = true;
    tables[0].has_unknown_row = GetParam();
    KeysConfig config;
    const Status status =
        MakeKeysConfig(std::move(servers), std::move(tables), &config);
    EXPECT_TRUE(status.ok()) << status.message();
    config_ = std::make_shared<const KeysConfig>(std::move(config));
  }

  const BucketLayout& layout() const { return config_->tables[0].layout; }

  // Returns the row of a key. In the tests, keys that are divisible by 5 have
  // no row.
  int64_t RowOf(int64_t key) {
    if (key % 5 == 0) return kNoRow;
    const auto found = row_of_.find(key);
    if (found != row_of_.end()) return found->second;
    int64_t row = layout().BucketOf(key) * kKeysPerBucket;
    while (taken_.count(row) > 0) ++row;
    taken_.insert(row);
    return row_of_[key] = row;
  }

  std::shared_ptr<const KeyStep> Make(const std::vector<int64_t>& title,
                                      const std::vector<int64_t>& shown,
                                      const std::vector<int64_t>& body) {
    std::vector<FeatureInput<int64_t>> inputs;
    for (const auto* ids : {&title, &shown, &body}) {
      FeatureInput<int64_t> input;
      input.ids = *ids;
      input.splits = splits_;
      input.form = Form::kRagged;
      input.num_samples = 2;
      inputs.push_back(input);
    }
    std::shared_ptr<const KeyStep> step;
    const Status status = KeyStep::Make(config_, inputs, UnevenFor(2), &step);
    EXPECT_TRUE(status.ok()) << status.message();
    return step;
  }

  std::vector<KeyFetchMessage> ReadRequests(const KeyStep& step) {
    std::vector<Bytes> requests(2);
    EXPECT_TRUE(step.Request({1, 2, 3}, /*training=*/true, /*kinds=*/{1, 0},
                             [&](int32_t server, int64_t size, uint8_t** to) {
                               requests[server].resize(size);
                               *to = requests[server].data();
                               return Status();
                             })
                    .ok());
    const std::vector<std::vector<PieceSize>> sizes = {
        {{"words", 24, kDim, 1}},
        {{"words", kNumRows + 1 - 24, kDim, 1}, {"ads", 5, kDim, 1}}};
    const std::vector<std::vector<bool>> is_open = {{true}, {true, false}};
    std::vector<KeyFetchMessage> messages(2);
    for (size_t s = 0; s < 2; ++s) {
      const Status status = messages[s].Read(requests[s], sizes[s], is_open[s]);
      EXPECT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(messages[s].token.number, 2);
      EXPECT_TRUE(messages[s].training);
    }
    return messages;
  }

  // Returns the response of a server.
  Bytes MakeResponse(const KeyFetchMessage& message, size_t server) {
    const PieceKeys& requested = message.keys[0];
    const auto num_keys = static_cast<int64_t>(requested.keys.size());
    Bytes bytes(FetchedKeysHeader(num_keys));
    std::set<int64_t> rows;
    for (int64_t i = 0; i < num_keys; ++i) {
      const int64_t row = RowOf(requested.keys[i]);
      const auto place = row == kNoRow
                             ? kNoPlace
                             : static_cast<uint32_t>(row - kOffsets[server]);
      std::memcpy(bytes.data() + kFetchedHeader + i * sizeof(place), &place,
                  sizeof(place));
      if (row != kNoRow) rows.insert(row);
    }
    if (server == 1 && GetParam()) rows.insert(kNumRows);
    const auto add = [&](int64_t row) {
      for (int64_t c = 0; c < kDim; ++c) {
        const float value = ValueOf(row, c);
        bytes.resize(bytes.size() + sizeof(value));
        std::memcpy(bytes.data() + bytes.size() - sizeof(value), &value,
                    sizeof(value));
      }
    };
    for (const int64_t row : rows) add(row);
    if (server == 1) {
      for (const uint32_t row : message.rows[1]) add(row);
    }
    return bytes;
  }

  std::shared_ptr<const KeysConfig> config_;
  const std::vector<int64_t> splits_ = {0, 2, 5};
  std::map<int64_t, int64_t> row_of_;
  std::set<int64_t> taken_;
};

TEST_P(KeyStepTest, KeysAreRequestedOnceAndLookedUpInTheirRows) {
  const std::vector<int64_t> title = {7, -3, 7, 11, 5}, shown = {4, 0, 4, 1, 1},
                             body = {11, 10, 7, 8, 5};
  const auto step = Make(title, shown, body);
  const std::vector<KeyFetchMessage> messages = ReadRequests(*step);
  std::map<int64_t, uint32_t> times;
  for (size_t s = 0; s < 2; ++s) {
    const PieceKeys& requested = messages[s].keys[0];
    for (size_t i = 0; i < requested.keys.size(); ++i) {
      const int64_t row = layout().BucketOf(requested.keys[i]) * kKeysPerBucket;
      EXPECT_EQ(row >= kOffsets[1], s == 1);
      EXPECT_TRUE(times.emplace(requested.keys[i], requested.times[i]).second);
    }
  }
  EXPECT_EQ(times, (std::map<int64_t, uint32_t>{
                       {-3, 1}, {5, 2}, {7, 3}, {8, 1}, {10, 1}, {11, 2}}));
  EXPECT_EQ(messages[1].rows[1], (std::vector<uint32_t>{0, 1, 4}));

  const std::vector<Bytes> responses = {MakeResponse(messages[0], 0),
                                        MakeResponse(messages[1], 1)};
  const std::vector<Span<const uint8_t>> fetched = {responses[0], responses[1]};
  std::shared_ptr<const WorkerStep> placed;
  const Status status = step->Place(fetched, UnevenFor(2), &placed);
  ASSERT_TRUE(status.ok()) << status.message();
  std::vector<std::vector<float>> found(3, std::vector<float>(2 * kDim));
  ASSERT_TRUE(placed
                  ->LookUp(fetched, RowKernelsFor(CurrentCpuLevel()), SerialFor,
                           {found[0].data(), found[1].data(), found[2].data()})
                  .ok());
  for (size_t f = 0; f < 3; ++f) {
    const std::vector<int64_t>& ids = f == 0 ? title : f == 1 ? shown : body;
    for (int64_t sample = 0; sample < 2; ++sample) {
      for (int64_t c = 0; c < kDim; ++c) {
        float expected = 0;
        for (int64_t i = splits_[sample]; i < splits_[sample + 1]; ++i) {
          int64_t row = ids[i];
          if (f != 1) row = RowOf(ids[i]);
          if (row == kNoRow && GetParam()) row = kNumRows;
          if (row != kNoRow) expected += ValueOf(row, c);
        }
        EXPECT_EQ(found[f][sample * kDim + c], expected) << f << " " << sample;
      }
    }
  }
}

TEST_P(KeyStepTest, InvalidResponsesAreRejected) {
  const auto step = Make({7, 8, 9, 11, 12}, {0, 0, 0, 0, 0}, {1, 2, 3, 4, 6});
  const std::vector<KeyFetchMessage> messages = ReadRequests(*step);
  const std::vector<Bytes> responses = {MakeResponse(messages[0], 0),
                                        MakeResponse(messages[1], 1)};
  std::shared_ptr<const WorkerStep> placed;
  const auto error_message =
      [&](const std::vector<Span<const uint8_t>>& fetched) {
        return step->Place(fetched, SerialFor, &placed).message();
      };
  EXPECT_NE(
      error_message({responses[0]}).find("one tensor for each of 2 servers"),
      std::string::npos);
  Bytes cut = responses[1];
  while (!cut.empty()) {
    cut.pop_back();
    // The memory has exactly the size of the message, so that AddressSanitizer
    // detects reads beyond the message.
    const Bytes exact(cut);
    const std::vector<Span<const uint8_t>> fetched = {responses[0], exact};
    if (step->Place(fetched, SerialFor, &placed).ok()) {
      std::vector<float> out(2 * kDim);
      EXPECT_FALSE(placed
                       ->LookUp(fetched, RowKernelsFor(CurrentCpuLevel()),
                                SerialFor, {out.data(), out.data(), out.data()})
                       .ok())
          << cut.size();
    }
  }
  // The first invalid row is outside the shard. The second invalid row is the
  // row for unknown keys, which cannot be the row of a key.
  for (const uint32_t place : {uint32_t{41}, uint32_t{40}}) {
    Bytes bad = responses[1];
    std::memcpy(bad.data() + kFetchedHeader, &place, sizeof(place));
    EXPECT_NE(error_message({responses[0], bad})
                  .find("rows of the requested shards. Received: row " +
                        std::to_string(place) + " of shard 1 (table 'words')"),
              std::string::npos);
  }
}

INSTANTIATE_TEST_SUITE_P(HasUnknownRow, KeyStepTest, testing::Bool());

TEST(KeysConfigTest, ShardsWithIncompleteBucketsAreRejected) {
  for (const std::vector<int64_t>& offsets :
       {std::vector<int64_t>{0, 23, 65}, {0, 24, 64}}) {
    auto servers = std::make_shared<ServersConfig>();
    servers->engine.tables.resize(1);
    servers->engine.tables[0].name = "words";
    servers->engine.tables[0].partition =
        MakePartition(Placement::kOffsets, offsets);
    std::vector<OpenTable> tables(1);
    tables[0].is_open = true;
    KeysConfig config;
    const Status status = MakeKeysConfig(servers, tables, &config);
    EXPECT_NE(
        status.message().find("must be partitioned into complete buckets"),
        std::string::npos)
        << status.message();
  }
}

}  // namespace
}  // namespace layoutmap
