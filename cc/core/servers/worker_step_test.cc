// Compares a step that a worker and servers run with a step of the host engine.

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
#include "cc/core/base/row_type.h"
#include "cc/core/base/views.h"
#include "cc/core/engine/engine_test.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/servers/applied_closures.h"
#include "cc/core/servers/messages.h"
#include "cc/core/servers/pieces.h"
#include "cc/core/servers/wire.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/tables/table_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

using Bytes = std::vector<uint8_t>;

EngineConfig ContiguousConfig() {
  EngineConfig config = TestConfig(1);
  config.tables[1].partition = MakePartition(Placement::kOffsets, {0, 3, 3, 7});
  return config;
}

// The server of each shard: two shards of `ads`, then three shards of `words`.
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

  // Returns the table and the shard of each piece on a server.
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

  std::vector<PieceSize> SizesOf(int32_t server) {
    std::vector<PieceSize> sizes;
    for (const auto& [t, s] : PiecesOf(server)) {
      const TableSpec& table = config_->engine.tables[t];
      sizes.push_back({table.name, tables_[t].partition().shard_size(s),
                       table.dim, /*num_hyperparameters=*/1});
    }
    return sizes;
  }

  template <typename T>
  Bytes Fetch(int32_t server, const Bytes& request) {
    const auto pieces = PiecesOf(server);
    FetchMessage message;
    EXPECT_TRUE(message.Read(request, SizesOf(server)).ok());
    EXPECT_EQ(message.wire, config_->wire);
    std::vector<RowPartition> partitions(pieces.size());
    std::vector<PieceRead> reads(pieces.size());
    for (size_t p = 0; p < pieces.size(); ++p) {
      const auto view =
          View(&tables_[pieces[p].first], pieces[p].second, &partitions[p]);
      reads[p].table.partition = view.partition;
      reads[p].table.dim = view.dim;
      reads[p].table.shards = {view.shards[0]};
      reads[p].rows = message.rows[p];
    }
    Bytes fetched(kFetchedHeader + NumValues(reads) * sizeof(T));
    WriteNumUpdates(5, fetched.data());
    FetchRows(reads, kernels_, UnevenFor(3),
              reinterpret_cast<T*>(fetched.data() + kFetchedHeader));
    return fetched;
  }

  void Apply(int32_t server, const Bytes& request) {
    const auto places = PiecesOf(server);
    std::vector<Piece> pieces;
    for (const auto& [t, s] : places) {
      const TableSpec& table = config_->engine.tables[t];
      Piece piece;
      piece.table = table.name;
      piece.dim = table.dim;
      piece.optimizer = table.optimizer;
      piece.num_hyperparameters = 1;
      pieces.push_back(piece);
    }
    ApplyMessage message;
    ASSERT_TRUE(message.Read(request, SizesOf(server)).ok());
    EXPECT_EQ(message.header.token.number, 4);
    EXPECT_EQ(message.header.num_updates, 5);
    std::vector<float> widened(message.half_gradients.size());
    FromBfloat16(message.half_gradients, SerialFor, widened.data());
    const bool is_narrow = message.wire == RowType::kBfloat16;
    std::vector<PieceUpdate> updates;
    const Status status = ReadUpdates(
        pieces, message, is_narrow ? widened : message.gradients, &updates);
    ASSERT_TRUE(status.ok()) << status.message();
    std::vector<RowPartition> partitions(2 * pieces.size());
    for (size_t p = 0; p < pieces.size(); ++p) {
      const auto [t, s] = places[p];
      updates[p].table = View(&tables_[t], s, &partitions[2 * p]);
      if (NumSlots(pieces[p].optimizer) == 1) {
        updates[p].slots = {View(&slots_[t], s, &partitions[2 * p + 1])};
      }
    }
    ApplyUpdates(pieces, updates, 0, kernels_, UnevenFor(2));
  }

  // Runs a step on all servers and returns its activations.
  template <typename T>
  Values Step(const TestBatch& batch, const Values& like, uint32_t seed,
              Values* gradients) {
    const auto step =
        WorkerStep::Make(config_, trainer_.MakeBatch(batch), UnevenFor(2));
    std::vector<Bytes> requests(3), received;
    std::vector<Span<const uint8_t>> fetched;
    EXPECT_TRUE(step->Request(Into(&requests)).ok());
    for (int32_t s = 0; s < 3; ++s) {
      received.push_back(Fetch<T>(s, requests[s]));
    }
    for (const Bytes& one : received) fetched.push_back(one);
    Values found;
    std::vector<float*> out;
    for (const std::vector<float>& one : like) {
      found.emplace_back(one.size());
      gradients->push_back(RandomFloats(one.size(), seed));
    }
    for (std::vector<float>& one : found) out.push_back(one.data());
    EXPECT_TRUE(step->LookUp(fetched, kernels_, UnevenFor(3), out).ok());
    BatchGradients given = Trainer::MakeGradients(*gradients);
    given.hyperparameters = {{kLearningRate}, {kLearningRate}};
    EXPECT_TRUE(step->Fold(given, fetched, {1, 4, 9}, kernels_, UnevenFor(3),
                           Into(&requests))
                    .ok());
    ExpectNoRowsAreRequired(*step, given, fetched, requests);
    for (int32_t s = 0; s < 3; ++s) Apply(s, requests[s]);
    return found;
  }

  // Compares updates with updates that were computed without fetched rows.
  void ExpectNoRowsAreRequired(const WorkerStep& step,
                               const BatchGradients& gradients,
                               std::vector<Span<const uint8_t>> fetched,
                               const std::vector<Bytes>& expected) const {
    constexpr size_t kPlace = ApplyHeader::kNumBytes - sizeof(int64_t);
    std::vector<Bytes> requests(expected.size());
    for (Span<const uint8_t>& one : fetched) one = {one.data(), kFetchedHeader};
    EXPECT_TRUE(step.Fold(gradients, fetched, {1, 4, 9}, kernels_, UnevenFor(3),
                          Into(&requests))
                    .ok());
    EXPECT_EQ(requests, expected);
    EXPECT_TRUE(step.Fold(gradients, {}, {1, 4, 9}, kernels_, UnevenFor(3),
                          Into(&requests))
                    .ok());
    for (size_t s = 0; s < expected.size(); ++s) {
      Bytes with_number = expected[s];
      std::memcpy(with_number.data() + kPlace, &kUnknownNumUpdates,
                  sizeof(kUnknownNumUpdates));
      EXPECT_EQ(requests[s], with_number);
    }
  }

  static Allocate Into(std::vector<Bytes>* requests) {
    return [requests](int32_t server, int64_t size, uint8_t** bytes) {
      (*requests)[server].assign(size, 0);
      *bytes = (*requests)[server].data();
      return Status();
    };
  }

  void UseBfloat16() {
    auto config = std::make_shared<ServersConfig>(*config_);
    config->wire = RowType::kBfloat16;
    config_ = std::move(config);
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

TEST_P(ServersTest, AStepIsBitwiseIdenticalToTheHostEngine) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    const TestBatch batch = RandomBatch(config_->engine, seed % 7, 100 * seed);
    Values expected, gradients;
    ASSERT_TRUE(trainer_.Enqueue(0, batch).ok());
    ASSERT_TRUE(trainer_.Dequeue(0, &expected).ok());
    EXPECT_EQ(Step<float>(batch, expected, seed, &gradients), expected);
    ASSERT_TRUE(trainer_.Apply(0, gradients).ok());
    for (size_t t = 0; t < tables_.size(); ++t) {
      ExpectSameBits(trainer_.tables()[t], tables_[t]);
      ExpectSameBits(trainer_.accumulators()[t], slots_[t]);
    }
  }
}

TEST_P(ServersTest, ABfloat16StepMatchesTheHostEngineWithinItsError) {
  UseBfloat16();
  const TestBatch batch = RandomBatch(config_->engine, 5, 77);
  Values expected, gradients;
  ASSERT_TRUE(trainer_.Enqueue(0, batch).ok());
  ASSERT_TRUE(trainer_.Dequeue(0, &expected).ok());
  const Values found = Step<uint16_t>(batch, expected, 3, &gradients);
  for (size_t f = 0; f < expected.size(); ++f) {
    for (size_t i = 0; i < expected[f].size(); ++i) {
      EXPECT_NEAR(found[f][i], expected[f][i], 0.25f) << f << ", " << i;
    }
  }
  ASSERT_TRUE(trainer_.Apply(0, gradients).ok());
  for (size_t t = 0; t < tables_.size(); ++t) {
    for (size_t s = 0; s < tables_[t].shards().size(); ++s) {
      const std::vector<float>& updated = tables_[t].shards()[s];
      const std::vector<float>& host = trainer_.tables()[t].shards()[s];
      for (size_t i = 0; i < updated.size(); ++i) {
        EXPECT_NEAR(updated[i], host[i], 0.25f) << t << ", " << s << ", " << i;
      }
    }
  }
}

TEST_P(ServersTest, ResponsesOfOtherSizesAreRejected) {
  const auto step = WorkerStep::Make(
      config_, trainer_.MakeBatch(RandomBatch(config_->engine, 3, 1)),
      SerialFor);
  const Bytes nothing;
  const std::vector<Span<const uint8_t>> few(2, nothing), empty(3, nothing);
  EXPECT_NE(
      step->LookUp(few, kernels_, SerialFor, {}).message().find("each of"),
      std::string::npos);
  EXPECT_NE(step->LookUp(empty, kernels_, SerialFor, {})
                .message()
                .find("the size of the requested rows"),
            std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(Cuts, ServersTest, testing::ValuesIn(kServers));

TEST(ServersConfigTest, ShardsMustBeContiguousAndOnAServer) {
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

TEST(ServersConfigTest, WireTypesAreFloat32AndBfloat16) {
  ServersConfig config;
  config.engine = ContiguousConfig();
  config.server_of_shard = {0, 0, 0, 0, 0};
  config.wire = RowType::kFloat16;
  EXPECT_NE(CheckServersConfig(config).message().find("`wire_dtype`"),
            std::string::npos);
}

TEST(PiecesTest, AnInvalidHyperparameterIsRejected) {
  std::vector<Piece> pieces(1);
  pieces[0].table = "ads";
  pieces[0].dim = 2;
  pieces[0].optimizer = Optimizer::kSgd;
  ApplyMessage message;
  message.rows = {{1}};
  const std::vector<float> rate = {-1};
  message.hyperparameters = {rate};
  std::vector<PieceUpdate> updates;
  EXPECT_NE(ReadUpdates(pieces, message, std::vector<float>{1, 1}, &updates)
                .message()
                .find("learning rate"),
            std::string::npos);
}

}  // namespace
}  // namespace layoutmap
