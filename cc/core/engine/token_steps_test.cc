#include "cc/core/engine/token_steps.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for_test.h"
#include "cc/core/base/status.h"
#include "cc/core/engine/engine_test.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/engine/marks.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/steps/step.h"
#include "cc/core/tables/table_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

using Marks = std::vector<float>;

constexpr int64_t kNumSamples = 4;

// A trainer whose steps are identified by tokens.
class TokenTrainer : public Trainer {
 public:
  explicit TokenTrainer(int32_t num_replicas)
      : Trainer(TestConfig(num_replicas)), tokens(&engine()) {}

  TestBatch BatchOf(uint32_t seed) {
    return RandomBatch(config(), kNumSamples, seed);
  }

  Values GradientsOf(uint32_t seed) {
    Values gradients;
    for (size_t f = 0; f < config().features.size(); ++f) {
      gradients.push_back(
          RandomFloats(OutputRow(config().features[f], kNumSamples, 0) *
                           config().dim_of_feature(f),
                       seed * 10 + f));
    }
    return gradients;
  }

  int64_t Open(uint32_t seed, int32_t replica = 0) {
    int64_t token = 0;
    const Status status =
        tokens.Open(replica, MakeBatch(BatchOf(seed)), &token);
    EXPECT_TRUE(status.ok()) << status.message();
    return token;
  }

  Status TryFollow(int64_t token, uint32_t seed, int32_t replica,
                   Marks* marks) {
    return TryFollow(token, GradientsOf(seed), replica, marks);
  }

  // `values` must be valid until the gradients are applied.
  Status TryFollow(int64_t token, Values values, int32_t replica,
                   Marks* marks) {
    Mark mark;
    LM_RETURN_IF_ERROR(tokens.Follow(replica, token,
                                     MakeGradients(std::move(values)), {},
                                     parallel_for, &mark));
    marks->assign(kMarkSize * config().num_replicas, -0.0f);
    std::copy(mark.begin(), mark.end(), marks->begin() + replica * kMarkSize);
    return Status();
  }

  Marks Follow(int64_t token, uint32_t seed, int32_t replica = 0) {
    Marks marks;
    const Status status = TryFollow(token, seed, replica, &marks);
    EXPECT_TRUE(status.ok()) << status.message();
    return marks;
  }

  Marks Zeros() { return Marks(kMarkSize * config().num_replicas); }

  Status Apply(const Marks& marks, int32_t replica = 0) {
    std::shared_ptr<HostEngine::Step> step;
    LM_RETURN_IF_ERROR(tokens.BeginApply(
        replica, marks, {{kLearningRate}, {kLearningRate}}, &step));
    if (step == nullptr) return Status();
    tokens.Prepare(step.get(), parallel_for);
    const Status status = Update(*step);
    tokens.FinishApply(replica, *step, status.ok());
    return status;
  }

  TokenSteps tokens;
};

Marks Sum(const Marks& one, const Marks& other, float factor = 1.0f) {
  Marks sum;
  for (size_t i = 0; i < one.size(); ++i) {
    sum.push_back(factor * (one[i] + other[i]));
  }
  return sum;
}

void ExpectOk(const Status& status) {
  ASSERT_TRUE(status.ok()) << status.message();
}

void ExpectFails(const Status& status, const std::string& words) {
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find(words), std::string::npos)
      << status.message();
}

// Expects that the tables equal the result of one update for the lookups in the
// given order.
void ExpectTrained(TokenTrainer* trainer, std::vector<TestTable> tables,
                   std::vector<TestTable> accumulators,
                   const std::vector<uint32_t>& batches,
                   const std::vector<Values>& gradients) {
  std::vector<TestBatch> read;
  for (uint32_t seed : batches) read.push_back(trainer->BatchOf(seed));
  ReferenceUpdate(trainer->config(), read, gradients, &tables, &accumulators);
  for (size_t t = 0; t < tables.size(); ++t) {
    EXPECT_EQ(trainer->tables()[t].shards(), tables[t].shards());
    EXPECT_EQ(trainer->accumulators()[t].shards(), accumulators[t].shards());
  }
}

TEST(TokenStepsTest, ALookupThatIsTakenBackHasNoEffect) {
  TokenTrainer trainer(1);
  const int64_t first = trainer.Open(0);
  const int64_t samples = trainer.engine().Describe().features[0].num_samples;
  const int64_t second = trainer.Open(1);
  ExpectFails(trainer.tokens.TakeBack(0, first), "newest");
  ExpectOk(trainer.tokens.TakeBack(0, second));
  EXPECT_EQ(trainer.engine().Describe().features[0].num_samples, samples);
  EXPECT_EQ(trainer.tokens.NumOpen(), std::vector<int64_t>{1});
  ExpectFails(trainer.tokens.TakeBack(0, second), "expired");
  ExpectFails(trainer.tokens.TakeBack(0, 99), "`token` must be");
  EXPECT_GT(trainer.Open(2), second);
  ExpectOk(trainer.Apply(trainer.Follow(first, 0)));
}

TEST(TokenStepsTest, StepsInOrderEqualTheReference) {
  for (int num_workers : {1, 3}) {
    TokenTrainer trainer(1);
    trainer.parallel_for = UnevenFor(num_workers);
    Trainer in_order(TestConfig(1));
    for (uint32_t step = 0; step < 100; ++step) {
      ExpectOk(in_order.Enqueue(0, trainer.BatchOf(step)));
      ExpectOk(in_order.Dequeue(0));
      ExpectOk(in_order.Apply(0, trainer.GradientsOf(step)));
      ExpectOk(trainer.Apply(trainer.Follow(trainer.Open(step), step)));
    }
    for (size_t t = 0; t < trainer.tables().size(); ++t) {
      EXPECT_EQ(trainer.tables()[t].shards(), in_order.tables()[t].shards());
    }
    const HostEngine::Description found = trainer.engine().Describe();
    const HostEngine::Description expected = in_order.engine().Describe();
    EXPECT_EQ(found.num_updates, 100);
    EXPECT_EQ(found.features[0].num_samples, expected.features[0].num_samples);
    EXPECT_EQ(found.tables[0].num_unique_rows,
              expected.tables[0].num_unique_rows);
  }
}

TEST(TokenStepsTest, SeveralLookupsAreOneUpdate) {
  TokenTrainer trainer(1);
  const auto tables = trainer.tables(), accumulators = trainer.accumulators();
  const int64_t first = trainer.Open(1);
  // This lookup gets no gradients.
  trainer.Open(2);
  const int64_t second = trainer.Open(3);
  // A gradient tape computes gradients in reverse order.
  const Marks late = trainer.Follow(second, 3);
  const Marks early = trainer.Follow(first, 1);
  ExpectOk(trainer.Apply(Sum(early, late)));
  ExpectTrained(&trainer, tables, accumulators, {1, 3},
                {trainer.GradientsOf(1), trainer.GradientsOf(3)});
  EXPECT_EQ(trainer.engine().Describe().num_updates, 1);
}

TEST(TokenStepsTest, GradientsAreScaledByTheirMarks) {
  TokenTrainer trainer(1);
  const auto tables = trainer.tables(), accumulators = trainer.accumulators();
  // Averages two gradients of one lookup, as in a program with two losses.
  const int64_t token = trainer.Open(1);
  const Marks one = trainer.Follow(token, 1), other = trainer.Follow(token, 2);
  ExpectOk(trainer.Apply(Sum(one, other, 0.5f)));
  std::vector<Values> gradients = {trainer.GradientsOf(1),
                                   trainer.GradientsOf(2)};
  for (Values& values : gradients) {
    for (std::vector<float>& feature : values) {
      for (float& value : feature) value *= 0.5f;
    }
  }
  ExpectTrained(&trainer, tables, accumulators, {1, 1}, gradients);
}

TEST(TokenStepsTest, SkippedStepsHaveNoEffect) {
  TokenTrainer trainer(1);
  const auto tables = trainer.tables(), accumulators = trainer.accumulators();
  for (uint32_t step = 0; step < 200; ++step) {
    trainer.Follow(trainer.Open(step), step);
  }
  EXPECT_EQ(trainer.tokens.NumOpen()[0], TokenSteps::kMaxOpen);
  EXPECT_EQ(trainer.tokens.NumFollowed()[0], TokenSteps::kMaxOpen);
  ExpectOk(trainer.Apply(trainer.Follow(trainer.Open(7), 7)));
  ExpectTrained(&trainer, tables, accumulators, {7}, {trainer.GradientsOf(7)});
  // Lookups and gradients that are too old are discarded. Newer lookups and
  // gradients are kept.
  EXPECT_EQ(trainer.tokens.NumOpen()[0], TokenSteps::kKeptBehind + 1);
  EXPECT_EQ(trainer.tokens.NumFollowed()[0], TokenSteps::kKeptBehind);
  ExpectOk(trainer.Apply(trainer.Zeros()));
  EXPECT_EQ(trainer.engine().Describe().num_updates, 1);
}

TEST(TokenStepsTest, ExpiredLookupsAndGradientsAreRejected) {
  TokenTrainer trainer(1);
  Marks marks;
  const int64_t token = trainer.Open(1);
  const Marks mark = trainer.Follow(token, 1);
  ExpectOk(trainer.Apply(mark));
  const auto before = trainer.tables()[0].shards();
  trainer.Open(0);
  ExpectFails(trainer.Apply(mark), "have expired");
  // Stores newer gradients in the place of the applied gradients.
  for (uint32_t i = 0; i < TokenSteps::kMaxOpen; ++i) {
    trainer.Follow(trainer.Open(i), i);
  }
  ExpectFails(trainer.Apply(mark), "have expired");
  ExpectFails(trainer.TryFollow(token, 1, 0, &marks),
              "Lookup 1 of replica 0 has expired");
  ExpectFails(trainer.TryFollow(0, 1, 0, &marks), "`token` must be");
  ExpectFails(trainer.TryFollow(999, 1, 0, &marks), "`token` must be");
  ExpectFails(trainer.TryFollow(token, 1, 1, &marks), "`replica` must be");
  ExpectFails(trainer.Apply({1.0f}), "`marks` must have 512 values");
  const Marks last = trainer.Follow(trainer.Open(2), 2);
  trainer.tokens.Reset();
  ExpectFails(trainer.Apply(last), "have expired");
  EXPECT_EQ(trainer.tables()[0].shards(), before);
  EXPECT_GT(trainer.Open(3), 65);
}

// After the update, the rows may belong to other keys. A second update with the
// same lookup would change the rows of those keys.
TEST(TokenStepsTest, LookupsOfKeysExpireWithTheirUpdate) {
  TokenTrainer trainer(1);
  const auto num_open = [&] { return trainer.tokens.NumOpen()[0]; };
  for (const bool has_keys : {false, true}) {
    auto batch =
        std::make_shared<Batch>(*trainer.MakeBatch(trainer.BatchOf(1)));
    if (has_keys) {
      RaggedIds& ids = (*batch)[0];
      const std::vector<int64_t> rows(ids.rows().begin(), ids.rows().end());
      ids.TakeRowsOfKeys(rows, -1, 7);
    }
    trainer.tokens.Reset();
    int64_t token = 0;
    ExpectOk(trainer.tokens.Open(0, batch, &token));
    const int64_t other = trainer.Open(2);
    const Marks marks = trainer.Follow(token, 3);
    EXPECT_EQ(num_open(), 2);
    ExpectOk(trainer.Apply(marks));
    EXPECT_EQ(num_open(), has_keys ? 1 : 2);
    Marks again;
    // The caller may assign the rows to other keys.
    trainer.tokens.VisitInFlight([](const Batch&) {});
    if (has_keys) {
      ExpectFails(trainer.TryFollow(token, 3, 0, &again),
                  "its update was already applied");
    } else {
      ExpectOk(trainer.TryFollow(token, 3, 0, &again));
    }
    ExpectOk(trainer.Apply(trainer.Follow(other, 4)));
  }
}

TEST(TokenStepsTest, GradientsAreAppliedAgainUntilTheNextLookup) {
  for (const bool visits : {false, true}) {
    TokenTrainer trainer(1), expected(1);
    const int64_t token = trainer.Open(1);
    const Marks marks = trainer.Follow(token, 3);
    for (int i = 0; i < 2; ++i) ExpectOk(trainer.Apply(marks));
    // Another gradient of the same lookup, and its sum with the first one.
    const Marks second = trainer.Follow(token, 5);
    EXPECT_EQ(trainer.tokens.NumFollowed()[0], 1);
    ExpectOk(trainer.Apply(Sum(marks, second)));
    EXPECT_EQ(trainer.tokens.NumFollowed()[0], 0);
    const int64_t other = expected.Open(1);
    const Marks a = expected.Follow(other, 3), b = expected.Follow(other, 3),
                c = expected.Follow(other, 3), d = expected.Follow(other, 5);
    ExpectOk(expected.Apply(a));
    ExpectOk(expected.Apply(b));
    ExpectOk(expected.Apply(Sum(c, d)));
    EXPECT_EQ(trainer.tables()[0].shards(), expected.tables()[0].shards());
    // Zeros do not apply a gradient again.
    ExpectOk(trainer.Apply(trainer.Zeros()));
    EXPECT_EQ(trainer.engine().Describe().num_updates, 3);
    if (visits) {
      trainer.tokens.VisitInFlight([](const Batch&) {});
    } else {
      trainer.Open(2);
    }
    ExpectFails(trainer.Apply(marks), "already applied");
    ExpectFails(trainer.Apply(second), "already applied");
  }
}

// Replica 1 looks rows up while an update of replica 0 waits for replica 1.
TEST(TokenStepsTest, AnUpdateThatWaitsKeepsAppliedGradients) {
  TokenTrainer trainer(2), expected(2);
  for (TokenTrainer* one : {&trainer, &expected}) {
    const Marks first = one->Follow(one->Open(1, 0), 3, 0);
    const Marks second = one->Follow(one->Open(2, 1), 5, 1);
    ExpectOk(one->Apply(first, 0));
    ExpectOk(one->Apply(second, 1));
    ExpectOk(one->Apply(first, 0));
    if (one == &trainer) {
      one->Open(3, 1);
      one->tokens.VisitInFlight([](const Batch&) {});
    }
    ExpectOk(one->Apply(one->Zeros(), 1));
    EXPECT_EQ(one->engine().Describe().num_updates, 2);
  }
  EXPECT_EQ(trainer.tables()[0].shards(), expected.tables()[0].shards());
  // The gradients of replica 0 are discarded after the update.
  trainer.Open(3, 1);
  const Marks third = trainer.Follow(trainer.Open(4, 0), 3, 0);
  ExpectOk(trainer.Apply(third, 0));
  ExpectOk(trainer.Apply(trainer.Zeros(), 1));
}

TEST(TokenStepsTest, ErrorsSayWhyALookupHasExpired) {
  TokenTrainer trainer(1);
  Marks marks;
  const int64_t first = trainer.Open(1);
  int64_t newest = first;
  for (uint32_t i = 0; i <= TokenSteps::kKeptBehind; ++i) {
    newest = trainer.Open(i);
  }
  ExpectOk(trainer.Apply(trainer.Follow(newest, 1)));
  ExpectFails(trainer.TryFollow(first, 1, 0, &marks),
              "more than 8 lookups newer came first. Apply");
  for (uint32_t i = 0; i < TokenSteps::kMaxOpen; ++i) trainer.Open(i);
  ExpectFails(trainer.TryFollow(newest, 1, 0, &marks),
              "64 newer lookups were made");
  const int64_t last = trainer.Open(2);
  trainer.tokens.Reset();
  ExpectFails(trainer.TryFollow(last, 1, 0, &marks),
              "a checkpoint was restored, after the lookup");
}

TEST(TokenStepsTest, GradientsOfAnEarlierGenerationAreRejected) {
  TokenTrainer trainer(1);
  const Marks old = trainer.Follow(trainer.Open(1), 1);
  Marks last;
  for (uint32_t i = 0; i < TokenSteps::kMaxOpen; ++i) {
    last = trainer.Follow(trainer.Open(i), i);
  }
  // Both gradients have the same place. Only the newer gradient is still
  // stored.
  ExpectFails(trainer.Apply(Sum(old, last)), "has expired");
  ExpectOk(trainer.Apply(last));
}

TEST(TokenStepsTest, NonFiniteMarksGiveNonFiniteUpdates) {
  TokenTrainer trainer(1);
  Marks marks = trainer.Follow(trainer.Open(1), 1);
  for (float& mark : marks) {
    if (mark != 0) mark *= NAN;
  }
  ExpectOk(trainer.Apply(marks));
  EXPECT_EQ(trainer.engine().Describe().num_updates, 1);
}

TEST(TokenStepsTest, ReplicasAreSummedLikeOneReplica) {
  TokenTrainer trainer(3);
  for (uint32_t step = 0; step < 10; ++step) {
    const auto tables = trainer.tables(), accumulators = trainer.accumulators();
    std::vector<Marks> marks;
    std::vector<uint32_t> seeds;
    std::vector<Values> gradients;
    for (uint32_t call = 0; call < 2; ++call) {
      for (uint32_t r = 0; r < 3; ++r) {
        seeds.push_back(step * 10 + 3 * call + r);
        gradients.push_back(trainer.GradientsOf(seeds.back()));
      }
    }
    for (int32_t r = 0; r < 3; ++r) {
      const int64_t first = trainer.Open(seeds[r], r);
      const int64_t second = trainer.Open(seeds[3 + r], r);
      const Marks late = trainer.Follow(second, seeds[3 + r], r);
      marks.push_back(Sum(trainer.Follow(first, seeds[r], r), late));
    }
    for (int32_t i = 0; i < 3; ++i) {
      const int32_t r = (i + step) % 3;
      ExpectOk(trainer.Apply(marks[r], r));
    }
    ExpectTrained(&trainer, tables, accumulators, seeds, gradients);
  }
}

TEST(TokenStepsTest, AStepThatFailedInOneReplicaEnds) {
  TokenTrainer trainer(2);
  const auto tables = trainer.tables(), accumulators = trainer.accumulators();
  const auto follow = [&](uint32_t seed, int32_t replica) {
    return trainer.Follow(trainer.Open(seed, replica), seed, replica);
  };
  const Marks first = follow(1, 0);
  follow(2, 1);
  ExpectOk(trainer.Apply(first, 0));
  ExpectFails(trainer.Apply({1.0f}, 1), "`marks` must have");
  ExpectFails(trainer.Apply(first, 0), "replica 1: `marks` must have");
  // Both replicas run the next step.
  const Marks again = follow(3, 0), other = follow(4, 1);
  ExpectOk(trainer.Apply(again, 0));
  ExpectOk(trainer.Apply(other, 1));
  ExpectTrained(&trainer, tables, accumulators, {3, 4},
                {trainer.GradientsOf(3), trainer.GradientsOf(4)});
}

TEST(TokenStepsTest, AReplicaThatSkipsAStepIsReported) {
  TokenTrainer trainer(3);
  ExpectOk(trainer.Apply(trainer.Follow(trainer.Open(1), 1), 0));
  ExpectOk(trainer.Apply(trainer.Zeros(), 2));
  ExpectFails(trainer.Apply(trainer.Follow(trainer.Open(2), 2), 0),
              "Missing replicas: 1");
  ExpectFails(trainer.Apply(trainer.Zeros(), 1), "failed");
  EXPECT_EQ(trainer.engine().Describe().num_updates, 0);
}

// Expects success, or one of two errors: another update is running, or the
// lookup has expired.
void ExpectOkOrTooLate(const Status& status) {
  EXPECT_TRUE(status.ok() || status.code() == Code::kFailedPrecondition ||
              status.code() == Code::kNotYet)
      << status.message();
}

TEST(TokenStepsTest, ThreadsCanOpenFollowAndApplyConcurrently) {
  TokenTrainer trainer(1);
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&trainer, t] {
      for (uint32_t i = 0; i < 50; ++i) {
        int64_t token = 0;
        Marks marks;
        std::shared_ptr<const Batch> batch;
        ExpectOk(trainer.tokens.Open(
            0, trainer.MakeBatch(trainer.BatchOf(50 * t + i)), &token));
        ExpectOkOrTooLate(trainer.tokens.Find(0, token, &batch));
        const Status followed = trainer.TryFollow(token, i, 0, &marks);
        ExpectOkOrTooLate(followed);
        if (followed.ok()) ExpectOkOrTooLate(trainer.Apply(marks));
        if (i % 20 == 0) trainer.tokens.Reset();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(trainer.tokens.NumOpen()[0], TokenSteps::kMaxOpen);
}

TEST(TokenStepsTest, TablesWithoutAnOptimizerCannotBeTrained) {
  EngineConfig config = TestConfig(1);
  config.tables[1].optimizer = Optimizer::kNone;
  Trainer trainer(config);
  TokenSteps tokens(&trainer.engine());
  int64_t token;
  ExpectOk(tokens.Open(
      0, trainer.MakeBatch(RandomBatch(config, kNumSamples, 1)), &token));
  Mark mark;
  ExpectFails(tokens.Follow(0, token, BatchGradients(), {}, SerialFor, &mark),
              "Table 'words' has no optimizer");
}

}  // namespace
}  // namespace layoutmap
