// Both halves of a step, worker and servers, against the host engine.

#include "cc/core/servers/worker_step.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/parallel_for_test.h"
#include "cc/core/base/views.h"
#include "cc/core/engine/engine_test.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/servers/applied_closures.h"
#include "cc/core/servers/messages.h"
#include "cc/core/servers/pieces.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/tables/table_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

EngineConfig ContiguousConfig() {
  EngineConfig config = TestConfig(1);
  config.tables[1].partition = MakePartition(Placement::kOffsets, {0, 3, 3, 7});
  return config;
}

// Shards 0, 1 of `ads` and 0, 1, 2 of `words`.
const std::vector<std::vector<int32_t>> kServers = {
    {0, 0, 0, 0, 0}, {0, 1, 0, 1, 1}, {2, 0, 1, 1, 0}};

class ServersTest : public testing::TestWithParam<std::vector<int32_t>> {
 protected:
  ServersTest()
      : trainer_(ContiguousConfig()),
        kernels_(RowKernelsFor(CurrentCpuLevel())) {
    auto config = std::make_shared<ServersConfig>();
    config->engine = trainer_.config();
    config->server_of_shard = GetParam();
    config->num_servers = 3;
    const Status status = CheckServersConfig(*config);
    EXPECT_TRUE(status.ok()) << status.message();
    config_ = std::move(config);
    for (size_t t = 0; t < config_->engine.tables.size(); ++t) {
      tables_.push_back(trainer_.tables()[t]);
      slots_.push_back(trainer_.accumulators()[t]);
    }
  }

  // The pieces of a server: table and shard of each.
  std::vector<std::pair<size_t, int32_t>> PiecesOf(int32_t server) {
    std::vector<std::pair<size_t, int32_t>> found;
    size_t next = 0;
    for (size_t t = 0; t < tables_.size(); ++t) {
      const int32_t count = tables_[t].partition().num_shards();
      for (int32_t s = 0; s < count; ++s) {
        if (config_->server_of_shard[next++] == server) found.push_back({t, s});
      }
    }
    return found;
  }

  static ShardedView<float> View(TestTable* table, int32_t shard,
                                 RowPartition* partition) {
    *partition = MakePartition(Placement::kDiv,
                               {0, table->partition().shard_size(shard)});
    ShardedView<float> view;
    view.partition = partition;
    view.dim = table->dim();
    view.shards = {table->shards()[shard].data()};
    return view;
  }

  std::vector<float> Fetch(int32_t server, const std::vector<uint32_t>& words) {
    const auto pieces = PiecesOf(server);
    std::vector<PieceSize> sizes;
    for (const auto& [t, s] : pieces) {
      sizes.push_back({config_->engine.tables[t].name,
                       tables_[t].partition().shard_size(s)});
    }
    std::vector<Span<const uint32_t>> rows;
    EXPECT_TRUE(ReadRows(words, sizes, &rows).ok());
    std::vector<RowPartition> partitions(pieces.size());
    std::vector<PieceRead> reads(pieces.size());
    for (size_t p = 0; p < pieces.size(); ++p) {
      const auto view =
          View(&tables_[pieces[p].first], pieces[p].second, &partitions[p]);
      reads[p].table.partition = view.partition;
      reads[p].table.dim = view.dim;
      reads[p].table.shards = {view.shards[0]};
      reads[p].rows = rows[p];
    }
    std::vector<float> fetched(kFetchedHeader + NumValues(reads));
    WriteNumUpdates(5, fetched.data());
    FetchRows(reads, kernels_, UnevenFor(3), fetched.data() + kFetchedHeader);
    return fetched;
  }

  void Apply(int32_t server, const ServerMessage& message) {
    const auto places = PiecesOf(server);
    ApplyHeader header;
    Span<const uint32_t> words;
    ASSERT_TRUE(ReadHeader(message.words, &header, &words).ok());
    EXPECT_EQ(header.token.number, 4);
    EXPECT_EQ(header.num_updates, 5);
    std::vector<PieceSize> sizes;
    std::vector<Piece> pieces;
    for (const auto& [t, s] : places) {
      const TableSpec& table = config_->engine.tables[t];
      sizes.push_back({table.name, tables_[t].partition().shard_size(s)});
      Piece piece;
      piece.table = table.name;
      piece.dim = table.dim;
      piece.optimizer = table.optimizer;
      piece.num_hyperparameters = 1;
      pieces.push_back(piece);
    }
    std::vector<Span<const uint32_t>> rows;
    ASSERT_TRUE(ReadRows(words, sizes, &rows).ok());
    std::vector<RowPartition> partitions(2 * pieces.size());
    std::vector<PieceUpdate> updates(pieces.size());
    for (size_t p = 0; p < pieces.size(); ++p) {
      const auto [t, s] = places[p];
      updates[p].rows = rows[p];
      updates[p].table = View(&tables_[t], s, &partitions[2 * p]);
      if (NumSlots(pieces[p].optimizer) == 1) {
        updates[p].slots = {View(&slots_[t], s, &partitions[2 * p + 1])};
      }
    }
    const Status status = ReadValues(pieces, message.values, &updates);
    ASSERT_TRUE(status.ok()) << status.message();
    ApplyUpdates(pieces, updates, 0, kernels_, UnevenFor(2));
  }

  static void ExpectSameBits(const TestTable& one, const TestTable& other) {
    for (size_t s = 0; s < one.shards().size(); ++s) {
      ASSERT_EQ(one.shards()[s].size(), other.shards()[s].size());
      if (one.shards()[s].empty()) continue;
      EXPECT_EQ(std::memcmp(one.shards()[s].data(), other.shards()[s].data(),
                            one.shards()[s].size() * sizeof(float)),
                0);
    }
  }

  Trainer trainer_;
  const RowKernels& kernels_;
  std::shared_ptr<const ServersConfig> config_;
  std::vector<TestTable> tables_;
  std::vector<TestTable> slots_;
};

TEST_P(ServersTest, AStepIsThatOfTheHostEngineToTheBit) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    const TestBatch batch = RandomBatch(config_->engine, seed % 7, 100 * seed);
    Values expected;
    ASSERT_TRUE(trainer_.Enqueue(0, batch).ok());
    ASSERT_TRUE(trainer_.Dequeue(0, &expected).ok());

    const auto step =
        WorkerStep::Make(config_, trainer_.MakeBatch(batch), UnevenFor(2));
    std::vector<std::vector<float>> received;
    std::vector<Span<const float>> fetched;
    const auto words = step->FetchWords();
    for (int32_t s = 0; s < 3; ++s) received.push_back(Fetch(s, words[s]));
    for (const std::vector<float>& one : received) fetched.push_back(one);
    Values found, gradients;
    std::vector<float*> out;
    for (const std::vector<float>& one : expected) {
      found.emplace_back(one.size());
      gradients.push_back(RandomFloats(one.size(), seed));
    }
    for (std::vector<float>& one : found) out.push_back(one.data());
    ASSERT_TRUE(step->LookUp(fetched, kernels_, UnevenFor(3), out).ok());
    EXPECT_EQ(found, expected);

    BatchGradients given = Trainer::MakeGradients(gradients);
    given.hyperparameters = {{kLearningRate}, {kLearningRate}};
    std::vector<ServerMessage> messages;
    ASSERT_TRUE(
        step->Fold(given, fetched, {1, 4, 9}, kernels_, UnevenFor(3), &messages)
            .ok());
    for (int32_t s = 0; s < 3; ++s) Apply(s, messages[s]);
    ASSERT_TRUE(trainer_.Apply(0, gradients).ok());
    for (size_t t = 0; t < tables_.size(); ++t) {
      ExpectSameBits(trainer_.tables()[t], tables_[t]);
      ExpectSameBits(trainer_.accumulators()[t], slots_[t]);
    }
  }
}

TEST_P(ServersTest, OtherSizesThanAskedForAreRefused) {
  const auto step = WorkerStep::Make(
      config_, trainer_.MakeBatch(RandomBatch(config_->engine, 3, 1)),
      SerialFor);
  const std::vector<float> nothing;
  const std::vector<Span<const float>> few(2, nothing), empty(3, nothing);
  EXPECT_NE(
      step->LookUp(few, kernels_, SerialFor, {}).message().find("each of"),
      std::string::npos);
  EXPECT_NE(step->LookUp(empty, kernels_, SerialFor, {})
                .message()
                .find("those of the rows that were asked for"),
            std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(Cuts, ServersTest, testing::ValuesIn(kServers));

TEST(ServersConfigTest, ShardsAreContiguousAndOnAServer) {
  ServersConfig config;
  config.engine = TestConfig(1);
  config.server_of_shard = {0, 0, 0, 0, 0};
  EXPECT_NE(CheckServersConfig(config).message().find("contiguous"),
            std::string::npos);
  config.engine = ContiguousConfig();
  EXPECT_TRUE(CheckServersConfig(config).ok());
  config.server_of_shard[4] = 1;
  EXPECT_NE(CheckServersConfig(config).message().find("[0, 1)"),
            std::string::npos);
  config.server_of_shard.pop_back();
  EXPECT_NE(CheckServersConfig(config).message().find("each of 5"),
            std::string::npos);
}

TEST(PiecesTest, ValuesThatDoNotFitAreRefused) {
  std::vector<Piece> pieces(1);
  pieces[0].table = "ads";
  pieces[0].dim = 2;
  pieces[0].optimizer = Optimizer::kSgd;
  pieces[0].num_hyperparameters = 1;
  std::vector<PieceUpdate> updates(1);
  const std::vector<uint32_t> rows = {3, 1};
  updates[0].rows = rows;
  const auto refusal = [&](std::vector<float> values) {
    return ReadValues(pieces, values, &updates).message();
  };
  EXPECT_NE(refusal({1, 1, 1}).find("5 values"), std::string::npos);
  EXPECT_NE(refusal({-1, 1, 1, 1, 1}).find("learning rate"), std::string::npos);
  EXPECT_NE(refusal({1, 1, 1, 1, 1}).find("must ascend"), std::string::npos);
}

}  // namespace
}  // namespace layoutmap
