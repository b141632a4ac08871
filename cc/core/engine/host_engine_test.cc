#include "cc/core/engine/host_engine.h"

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/parallel_for_test.h"
#include "cc/core/base/status.h"
#include "cc/core/engine/engine_test.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/steps/step.h"
#include "cc/core/tables/table_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

constexpr int64_t kNumSamples = 4;

TestBatch RandomBatchFor(const Trainer& trainer, uint32_t seed) {
  return RandomBatch(trainer.config(), kNumSamples, seed);
}

// Returns random gradients with the shapes of the activations.
Values RandomGradients(const Trainer& trainer, uint32_t seed) {
  Values gradients;
  for (size_t f = 0; f < trainer.config().features.size(); ++f) {
    const FeatureSpec& spec = trainer.config().features[f];
    gradients.push_back(RandomFloats(
        OutputRow(spec, kNumSamples, 0) * trainer.config().dim_of_feature(f),
        seed * 10 + f));
  }
  return gradients;
}

void ExpectOk(const Status& status) {
  ASSERT_TRUE(status.ok()) << status.message();
}

std::string ToString(const HostEngine::Description& d) {
  std::string text;
  for (size_t r = 0; r < d.pending.size(); ++r) {
    text += std::to_string(d.pending[r]) + (d.awaiting[r] ? "a " : " ");
  }
  return text + std::to_string(d.num_updates) + d.poisoned;
}

// The state of a trainer, which a failed call must not change.
struct Snapshot {
  explicit Snapshot(Trainer* trainer)
      : description(ToString(trainer->engine().Describe())) {
    for (TestTable& table : trainer->tables()) tables.push_back(table.shards());
    for (TestTable& table : trainer->accumulators()) {
      tables.push_back(table.shards());
    }
  }
  bool operator==(const Snapshot& other) const {
    return description == other.description && tables == other.tables;
  }
  std::string description;
  std::vector<Values> tables;
};

template <typename Call>
void ExpectFails(Trainer* trainer, const std::string& words, const Call& call,
                 Code code = Code::kFailedPrecondition) {
  const Snapshot before(trainer);
  const Status status = call();
  EXPECT_EQ(status.code(), code) << status.message();
  EXPECT_NE(status.message().find(words), std::string::npos)
      << status.message();
  EXPECT_TRUE(before == Snapshot(trainer))
      << "a failed call changed " << before.description << " into "
      << Snapshot(trainer).description;
}

TEST(HostEngineTest, TrainingMatchesTheReference) {
  for (int32_t num_replicas : {1, 2, 3}) {
    for (int num_workers : {1, 2, 8}) {
      Trainer trainer(TestConfig(num_replicas));
      trainer.parallel_for = UnevenFor(num_workers);
      std::vector<TestTable> tables = trainer.tables();
      std::vector<TestTable> accumulators = trainer.accumulators();
      for (uint32_t step = 0; step < 12; ++step) {
        std::vector<TestBatch> batches;
        std::vector<Values> gradients;
        for (int32_t r = 0; r < num_replicas; ++r) {
          batches.push_back(RandomBatchFor(trainer, step * 10 + r));
          gradients.push_back(RandomGradients(trainer, step * 10 + r));
          ExpectOk(trainer.Enqueue(r, batches[r]));
        }
        // The order in which the replicas dequeue changes in each step.
        for (int32_t i = 0; i < num_replicas; ++i) {
          const int32_t r = (i + step) % num_replicas;
          Values activations;
          ExpectOk(trainer.Dequeue(r, &activations));
          ASSERT_EQ(activations, ReferenceActivations(trainer.config(), &tables,
                                                      batches[r]));
        }
        for (int32_t i = 0; i < num_replicas; ++i) {
          const int32_t r = (2 * i + step) % num_replicas;
          // With two replicas, an order with a stride of 2 would select the
          // same replica twice.
          const int32_t turn = num_replicas == 2 ? (i + step) % 2 : r;
          ExpectOk(trainer.Apply(turn, gradients[turn]));
        }
        ReferenceUpdate(trainer.config(), batches, gradients, &tables,
                        &accumulators);
        for (size_t t = 0; t < tables.size(); ++t) {
          ASSERT_EQ(trainer.tables()[t].shards(), tables[t].shards());
          ASSERT_EQ(trainer.accumulators()[t].shards(),
                    accumulators[t].shards());
        }
      }
      EXPECT_EQ(trainer.engine().Describe().num_updates, 12);
    }
  }
}

TEST(HostEngineTest, StepsAreDequeuedInTheOrderOfTheirEnqueue) {
  EngineConfig config = TestConfig(1);
  config.max_pending_steps = 5;
  Trainer trainer(config);
  for (uint32_t step = 0; step < 5; ++step) {
    ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, step), false));
  }
  for (uint32_t step = 0; step < 5; ++step) {
    Values activations;
    ExpectOk(trainer.Dequeue(0, &activations));
    EXPECT_EQ(activations, ReferenceActivations(config, &trainer.tables(),
                                                RandomBatchFor(trainer, step)));
  }
}

TEST(HostEngineTest, AStepThatIsTakenBackHasNoEffect) {
  Trainer trainer(TestConfig(2));
  HostEngine& engine = trainer.engine();
  const auto enqueue = [&](uint32_t seed, bool training) {
    std::vector<std::shared_ptr<const Batch>> batches;
    for (int32_t r = 0; r < 2; ++r) {
      batches.push_back(trainer.MakeBatch(RandomBatchFor(trainer, seed + r)));
      ExpectOk(engine.EnqueueBatch(r, training, Status(), batches[r],
                                   trainer.parallel_for));
    }
    return batches;
  };
  const auto first = enqueue(0, true);
  const HostEngine::Description before = engine.Describe();
  for (const bool training : {true, false}) {
    const auto second = enqueue(2, training);
    // `TakeBackStep` only accepts the newest step.
    ExpectFails(&trainer, "newest", [&] { return engine.TakeBackStep(first); });
    ExpectOk(engine.TakeBackStep(second));
    const HostEngine::Description after = engine.Describe();
    EXPECT_EQ(after.pending, before.pending);
    for (size_t f = 0; f < before.features.size(); ++f) {
      EXPECT_EQ(after.features[f].num_samples, before.features[f].num_samples);
      EXPECT_EQ(after.features[f].ids.num_ids, before.features[f].ids.num_ids);
    }
    for (size_t t = 0; t < before.tables.size(); ++t) {
      EXPECT_EQ(after.tables[t].num_lookups, before.tables[t].num_lookups);
      EXPECT_EQ(after.tables[t].num_unique_rows,
                before.tables[t].num_unique_rows);
    }
    // `TakeBackStep` rejects a step that was already taken back.
    ExpectFails(&trainer, "newest",
                [&] { return engine.TakeBackStep(second); });
  }
  ExpectOk(trainer.Dequeue(0));
  ExpectFails(&trainer, "dequeued", [&] { return engine.TakeBackStep(first); });
  ExpectOk(trainer.Dequeue(1));
  // The gradients of the first step are pending. `TakeBackStep` accepts the
  // second step, because it is the newest.
  ExpectOk(engine.TakeBackStep(enqueue(4, true)));
  for (int32_t r = 0; r < 2; ++r) {
    ExpectOk(trainer.Apply(r, RandomGradients(trainer, r)));
  }
  EXPECT_EQ(engine.Describe().num_updates, 1);
  enqueue(6, true);
  ExpectOk(trainer.Dequeue(0));
}

TEST(HostEngineTest, APoisonedEngineRejectsCallsUntilAReset) {
  Trainer trainer(TestConfig(1));
  trainer.engine().Poison("a program failed");
  ExpectFails(&trainer, "a program failed",
              [&] { return trainer.Enqueue(0, RandomBatchFor(trainer, 0)); });
  trainer.engine().Reset();
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
}

TEST(HostEngineTest, DequeueAndApplyOfAnEmptyEngineFail) {
  for (int32_t num_replicas : {1, 2}) {
    Trainer trainer(TestConfig(num_replicas));
    ExpectFails(
        &trainer, "`dequeue` needs an enqueued step",
        [&] { return trainer.Dequeue(0); }, Code::kNotYet);
    ExpectFails(&trainer, "`apply_gradients` needs a dequeued step",
                [&] { return trainer.Apply(0, RandomGradients(trainer, 0)); });
    // The engine still rejects calls after another replica has enqueued a step.
    if (num_replicas == 1) continue;
    ExpectOk(trainer.Enqueue(1, RandomBatchFor(trainer, 0)));
    ExpectFails(
        &trainer, "`dequeue` needs an enqueued step",
        [&] { return trainer.Dequeue(0); }, Code::kNotYet);
  }
}

TEST(HostEngineTest, ApplyBeforeDequeueFails) {
  Trainer trainer(TestConfig(1));
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
  ExpectFails(&trainer, "`apply_gradients` needs a dequeued step",
              [&] { return trainer.Apply(0, RandomGradients(trainer, 0)); });
  ExpectOk(trainer.Dequeue(0));
  ExpectOk(trainer.Apply(0, RandomGradients(trainer, 0)));
  ExpectFails(&trainer, "`apply_gradients` needs a dequeued step",
              [&] { return trainer.Apply(0, RandomGradients(trainer, 0)); });
}

TEST(HostEngineTest, DequeueWhileGradientsArePendingFails) {
  Trainer trainer(TestConfig(1));
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 1)));
  ExpectOk(trainer.Dequeue(0));
  ExpectFails(&trainer, "still awaits its gradients",
              [&] { return trainer.Dequeue(0); });
  ExpectOk(trainer.Apply(0, RandomGradients(trainer, 0)));
  ExpectOk(trainer.Dequeue(0));
}

TEST(HostEngineTest, DequeueBeforeTheGradientsOfOtherReplicasFails) {
  Trainer trainer(TestConfig(2));
  for (int32_t r : {0, 1, 0, 1}) {
    ExpectOk(trainer.Enqueue(r, RandomBatchFor(trainer, r)));
  }
  ExpectOk(trainer.Dequeue(0));
  ExpectOk(trainer.Dequeue(1));
  ExpectOk(trainer.Apply(1, RandomGradients(trainer, 1)));
  ExpectFails(
      &trainer, "still waits for the gradients of another replica",
      [&] { return trainer.Dequeue(1); }, Code::kNotYet);
  EXPECT_EQ(trainer.engine().Describe().num_updates, 0);
  ExpectOk(trainer.Apply(0, RandomGradients(trainer, 0)));
  EXPECT_EQ(trainer.engine().Describe().num_updates, 1);
  ExpectOk(trainer.Dequeue(1));
}

TEST(HostEngineTest, AReplicaCanDequeueBeforeOthersEnqueue) {
  Trainer trainer(TestConfig(2));
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
  ExpectOk(trainer.Dequeue(0));
  ExpectOk(trainer.Apply(0, RandomGradients(trainer, 0)));
  EXPECT_EQ(trainer.engine().Describe().num_updates, 0);
  ExpectOk(trainer.Enqueue(1, RandomBatchFor(trainer, 1)));
  ExpectOk(trainer.Dequeue(1));
  ExpectOk(trainer.Apply(1, RandomGradients(trainer, 1)));
  EXPECT_EQ(trainer.engine().Describe().num_updates, 1);
}

TEST(HostEngineTest, AForwardOnlyStepRejectsGradients) {
  Trainer trainer(TestConfig(1));
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0), false));
  ExpectOk(trainer.Dequeue(0));
  ExpectFails(&trainer, "training=False",
              [&] { return trainer.Apply(0, RandomGradients(trainer, 0)); });
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
  ExpectOk(trainer.Dequeue(0));
  ExpectOk(trainer.Apply(0, RandomGradients(trainer, 0)));
}

TEST(HostEngineTest, ReplicasCanRunAheadWithoutTraining) {
  Trainer trainer(TestConfig(2));
  for (uint32_t step = 0; step < 2; ++step) {
    ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, step), false));
    ExpectOk(trainer.Dequeue(0));
  }
  for (uint32_t step = 0; step < 2; ++step) {
    ExpectOk(trainer.Enqueue(1, RandomBatchFor(trainer, step), false));
    ExpectOk(trainer.Dequeue(1));
  }
  EXPECT_EQ(ToString(trainer.engine().Describe()), "0 0 0");
}

TEST(HostEngineTest, AtMostMaxPendingStepsAreKept) {
  Trainer trainer(TestConfig(1));
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 1)));
  ExpectFails(&trainer, "2 steps are enqueued already",
              [&] { return trainer.Enqueue(0, RandomBatchFor(trainer, 2)); });
  ExpectOk(trainer.Dequeue(0));
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 2)));
}

TEST(HostEngineTest, AnInvalidReplicaIsRejectedWithoutPoison) {
  Trainer trainer(TestConfig(2));
  for (int32_t replica : {-1, 2, INT32_MAX, INT32_MIN}) {
    ExpectFails(
        &trainer, "`replica` must be in [0, 2)",
        [&] { return trainer.Enqueue(replica, RandomBatchFor(trainer, 0)); },
        Code::kInvalidArgument);
    ExpectFails(
        &trainer, "`replica` must be in [0, 2)",
        [&] { return trainer.Dequeue(replica); }, Code::kInvalidArgument);
    ExpectFails(
        &trainer, "`replica` must be in [0, 2)",
        [&] { return trainer.Apply(replica, RandomGradients(trainer, 0)); },
        Code::kInvalidArgument);
  }
}

TestBatch InvalidBatch(const Trainer& trainer) {
  TestBatch batch = RandomBatchFor(trainer, 0);
  batch[2].ids[1] = {3, 11};
  batch[2].weights.clear();
  return batch;
}

TEST(HostEngineTest, ASingleReplicaContinuesAfterAFailedEnqueue) {
  Trainer trainer(TestConfig(1));
  ExpectFails(
      &trainer,
      "Feature 'shown', sample 1: id 11 is outside table 'ads' with 11 rows",
      [&] { return trainer.Enqueue(0, InvalidBatch(trainer)); },
      Code::kInvalidArgument);
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
  ExpectOk(trainer.Dequeue(0));
  ExpectOk(trainer.Apply(0, RandomGradients(trainer, 0)));
}

void ExpectPoisoned(Trainer* trainer, const std::string& by) {
  EXPECT_NE(trainer->engine().Describe().poisoned.find(by), std::string::npos);
  for (int32_t r = 0; r < trainer->config().num_replicas; ++r) {
    ExpectFails(trainer, by, [&] {
      return trainer->Enqueue(r, RandomBatchFor(*trainer, 0));
    });
    ExpectFails(trainer, by, [&] { return trainer->Dequeue(r); });
    ExpectFails(trainer, by, [&] {
      return trainer->Apply(r, RandomGradients(*trainer, 0));
    });
  }
  trainer->engine().Reset();
  EXPECT_EQ(trainer->engine().Describe().poisoned, "");
  for (int32_t r = 0; r < trainer->config().num_replicas; ++r) {
    ExpectOk(trainer->Enqueue(r, RandomBatchFor(*trainer, r)));
    ExpectOk(trainer->Dequeue(r));
    ExpectOk(trainer->Apply(r, RandomGradients(*trainer, r)));
  }
}

TEST(HostEngineTest, AFailedEnqueuePoisonsSeveralReplicas) {
  Trainer trainer(TestConfig(3));
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
  ExpectOk(trainer.Dequeue(0));
  EXPECT_EQ(trainer.Enqueue(1, InvalidBatch(trainer)).code(),
            Code::kInvalidArgument);
  ExpectPoisoned(&trainer, "replica 1 failed to enqueue step 0");
  EXPECT_EQ(trainer.engine().Describe().num_updates, 1);
}

TEST(HostEngineTest, DifferentTrainingFlagsPoisonTheEngine) {
  Trainer trainer(TestConfig(2));
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0), true));
  const Status status = trainer.Enqueue(1, RandomBatchFor(trainer, 0), false);
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_NE(status.message().find("the same `training`"), std::string::npos);
  ExpectPoisoned(&trainer, "replica 1 failed to enqueue");
}

TEST(HostEngineTest, AReplicaThatExceedsMaxPendingStepsPoisonsTheEngine) {
  Trainer trainer(TestConfig(2));
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 1)));
  EXPECT_EQ(trainer.Enqueue(0, RandomBatchFor(trainer, 2)).code(),
            Code::kFailedPrecondition);
  ExpectPoisoned(&trainer, "replica 0 failed to enqueue step 2");
}

TEST(HostEngineTest, AWrongNumberOfFeaturesIsRejected) {
  Trainer trainer(TestConfig(1));
  TestBatch batch = RandomBatchFor(trainer, 0);
  batch.pop_back();
  ExpectFails(
      &trainer, "A batch must have 3 features. Received: 2",
      [&] { return trainer.Enqueue(0, batch); }, Code::kInvalidArgument);
}

TEST(HostEngineTest, ATableWithoutAnOptimizerCannotBeTrained) {
  EngineConfig config = TestConfig(1);
  config.tables[1].optimizer = Optimizer::kNone;
  Trainer trainer(config);
  ExpectFails(&trainer, "Table 'words' has no optimizer",
              [&] { return trainer.Enqueue(0, RandomBatchFor(trainer, 0)); });
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0), false));
  ExpectOk(trainer.Dequeue(0));
}

TEST(HostEngineTest, GradientsOfWrongSizeAreRejected) {
  Trainer trainer(TestConfig(1));
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
  ExpectOk(trainer.Dequeue(0));
  Values gradients = RandomGradients(trainer, 0);
  gradients[1].push_back(0);
  ExpectFails(
      &trainer,
      "Feature 'text': its gradient must be shaped like its activation, "
      "[4, 2, 5]. Received: 41 values",
      [&] { return trainer.Apply(0, gradients); }, Code::kInvalidArgument);
  ExpectOk(trainer.Apply(0, RandomGradients(trainer, 0)));
}

TEST(HostEngineTest, GradientsArePendingAgainAfterAFailedUpdate) {
  for (int32_t num_replicas : {1, 2}) {
    Trainer trainer(TestConfig(num_replicas));
    for (int32_t r = 0; r < num_replicas; ++r) {
      ExpectOk(trainer.Enqueue(r, RandomBatchFor(trainer, r)));
      ExpectOk(trainer.Dequeue(r));
    }
    if (num_replicas == 2) {
      ExpectOk(trainer.Apply(0, RandomGradients(trainer, 0)));
    }
    const int32_t last = num_replicas - 1;
    ExpectFails(
        &trainer, "the learning rate must be finite",
        [&] {
          return trainer.Apply(last, RandomGradients(trainer, last), NAN);
        },
        Code::kInvalidArgument);
    ExpectOk(trainer.Apply(last, RandomGradients(trainer, last)));
    EXPECT_EQ(trainer.engine().Describe().num_updates, 1);
  }
}

TEST(HostEngineTest, AStepStaysInTheQueueAfterAFailedLookup) {
  Trainer trainer(TestConfig(1));
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
  std::shared_ptr<const Batch> batch;
  ExpectOk(trainer.engine().BeginDequeue(0, &batch));
  std::shared_ptr<const Batch> again;
  EXPECT_NE(trainer.engine().BeginDequeue(0, &again).message().find(
                "while another call of it runs"),
            std::string::npos);
  EXPECT_EQ(again, nullptr);
  trainer.engine().FinishDequeue(0, false);
  EXPECT_EQ(ToString(trainer.engine().Describe()), "1 0");
  ExpectOk(trainer.Dequeue(0));
  ExpectOk(trainer.Apply(0, RandomGradients(trainer, 0)));
}

TEST(HostEngineTest, ResetDiscardsStepsAndKeepsCounts) {
  Trainer trainer(TestConfig(2));
  for (int32_t r : {0, 1}) {
    ExpectOk(trainer.Enqueue(r, RandomBatchFor(trainer, r)));
    ExpectOk(trainer.Dequeue(r));
    ExpectOk(trainer.Apply(r, RandomGradients(trainer, r)));
  }
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
  ExpectOk(trainer.Dequeue(0));
  trainer.engine().Reset();
  EXPECT_EQ(ToString(trainer.engine().Describe()), "0 0 1");
  ExpectFails(
      &trainer, "`dequeue` needs an enqueued step",
      [&] { return trainer.Dequeue(0); }, Code::kNotYet);
  ExpectFails(&trainer, "`apply_gradients` needs a dequeued step",
              [&] { return trainer.Apply(0, RandomGradients(trainer, 0)); });
}

TEST(HostEngineTest, ACallDuringAResetChangesNothing) {
  Trainer trainer(TestConfig(1));
  HostEngine& engine = trainer.engine();
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
  std::shared_ptr<const Batch> batch;
  ExpectOk(engine.BeginDequeue(0, &batch));
  engine.Reset();
  engine.FinishDequeue(0, true);
  EXPECT_EQ(ToString(engine.Describe()), "0 0");

  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
  ExpectOk(trainer.Dequeue(0));
  BatchGradients gradients;
  const Values values = RandomGradients(trainer, 0);
  for (const std::vector<float>& value : values) {
    gradients.features.push_back(value);
  }
  std::shared_ptr<HostEngine::Step> step;
  ExpectOk(engine.BeginApply(0, gradients, &step));
  ASSERT_NE(step, nullptr);
  engine.Reset();
  engine.FinishApply(0, true);
  EXPECT_EQ(ToString(engine.Describe()), "0 0");
}

TEST(HostEngineTest, AResetDuringAnEnqueueDiscardsItsStep) {
  Trainer trainer(TestConfig(1));
  trainer.parallel_for =
      [&](int64_t total, int64_t cost,
          const std::function<void(int64_t, int64_t)>& work) {
        SerialFor(total, cost, work);
        trainer.engine().Reset();
      };
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
  trainer.parallel_for = SerialFor;
  EXPECT_EQ(ToString(trainer.engine().Describe()), "0 0");
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
  ExpectOk(trainer.Dequeue(0));
}

TEST(HostEngineTest, InvalidConfigurationsAreRejected) {
  const auto error_message = [](const EngineConfig& config) {
    std::unique_ptr<HostEngine> engine;
    const Status status = HostEngine::Make(config, &engine);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_EQ(engine, nullptr);
    return status.message();
  };
  for (int32_t num_replicas : {0, -1, INT32_MAX}) {
    EngineConfig config = TestConfig(1);
    config.num_replicas = num_replicas;
    EXPECT_NE(error_message(config).find("`num_replicas`"), std::string::npos);
  }
  EngineConfig config = TestConfig(1);
  config.max_pending_steps = 0;
  EXPECT_NE(error_message(config).find("`max_pending_steps`"),
            std::string::npos);
  config = TestConfig(1);
  config.tables[1].name = "ads";
  EXPECT_EQ(error_message(config), "Two tables have the name 'ads'");
  config = TestConfig(1);
  config.tables[1].dim = 0;
  EXPECT_NE(error_message(config).find("Table 'words': dim must be at least 1"),
            std::string::npos);
  config = TestConfig(1);
  config.features.clear();
  EXPECT_NE(error_message(config).find("at least one feature"),
            std::string::npos);
  for (int32_t table : {-1, 2}) {
    config = TestConfig(1);
    config.table_of_feature[1] = table;
    EXPECT_NE(error_message(config).find("Feature 'text': table"),
              std::string::npos);
  }
  config = TestConfig(1);
  config.features[0].max_sequence_length = -1;
  EXPECT_NE(error_message(config).find("max_sequence_length"),
            std::string::npos);
}

// Runs each replica on a separate thread. Calls that return kNotYet are
// retried. The result must equal the result of running the steps sequentially.
TEST(HostEngineTest, EightConcurrentReplicasMatchTheReference) {
  constexpr int32_t kNumReplicas = 8;
  constexpr uint32_t kNumSteps = 30;
  Trainer trainer(TestConfig(kNumReplicas));
  std::vector<TestTable> tables = trainer.tables();
  std::vector<TestTable> accumulators = trainer.accumulators();
  std::atomic<int> num_wrong{0};
  const auto retry = [&](const auto& call) {
    for (;;) {
      const Status status = call();
      if (status.ok()) return;
      if (status.code() != Code::kNotYet) {
        ++num_wrong;
        return;
      }
      std::this_thread::yield();
    }
  };
  std::vector<std::thread> threads;
  for (int32_t r = 0; r < kNumReplicas; ++r) {
    threads.emplace_back([&, r] {
      for (uint32_t step = 0; step < kNumSteps; ++step) {
        if (!trainer.Enqueue(r, RandomBatchFor(trainer, step * 100 + r)).ok()) {
          ++num_wrong;
        }
        retry([&] { return trainer.Dequeue(r); });
        retry([&] {
          return trainer.Apply(r, RandomGradients(trainer, step * 100 + r));
        });
      }
    });
  }
  std::thread observer([&] {
    while (trainer.engine().Describe().num_updates < kNumSteps &&
           num_wrong == 0) {
      std::this_thread::yield();
    }
  });
  for (std::thread& thread : threads) thread.join();
  observer.join();
  ASSERT_EQ(num_wrong, 0);
  for (uint32_t step = 0; step < kNumSteps; ++step) {
    std::vector<TestBatch> batches;
    std::vector<Values> gradients;
    for (int32_t r = 0; r < kNumReplicas; ++r) {
      batches.push_back(RandomBatchFor(trainer, step * 100 + r));
      gradients.push_back(RandomGradients(trainer, step * 100 + r));
    }
    ReferenceUpdate(trainer.config(), batches, gradients, &tables,
                    &accumulators);
  }
  for (size_t t = 0; t < tables.size(); ++t) {
    EXPECT_EQ(trainer.tables()[t].shards(), tables[t].shards());
    EXPECT_EQ(trainer.accumulators()[t].shards(), accumulators[t].shards());
  }
}

// One thread resets the engine at arbitrary times, including during calls by
// other threads.
TEST(HostEngineTest, ResetsAtAnyTimeLeaveAWorkingEngine) {
  constexpr int32_t kNumReplicas = 4;
  Trainer trainer(TestConfig(kNumReplicas));
  std::atomic<bool> done{false};
  std::vector<std::thread> threads;
  for (int32_t r = 0; r < kNumReplicas; ++r) {
    threads.emplace_back([&, r] {
      for (uint32_t step = 0; !done; ++step) {
        (void)trainer.Enqueue(r, RandomBatchFor(trainer, step));
        (void)trainer.Dequeue(r);
        (void)trainer.Apply(r, RandomGradients(trainer, step));
      }
    });
  }
  for (int i = 0; i < 200; ++i) {
    trainer.engine().Reset();
    std::this_thread::yield();
  }
  done = true;
  for (std::thread& thread : threads) thread.join();
  trainer.engine().Reset();
  const int64_t num_updates = trainer.engine().Describe().num_updates;
  for (int32_t r = 0; r < kNumReplicas; ++r) {
    ExpectOk(trainer.Enqueue(r, RandomBatchFor(trainer, r)));
    ExpectOk(trainer.Dequeue(r));
    ExpectOk(trainer.Apply(r, RandomGradients(trainer, r)));
  }
  EXPECT_EQ(trainer.engine().Describe().num_updates, num_updates + 1);
}

// Tests only the order of steps. Other tests check the updates of rows.
class PipelinedTest : public testing::Test {
 protected:
  static EngineConfig Config(int32_t num_replicas) {
    EngineConfig config = TestConfig(num_replicas);
    config.is_pipelined = true;
    return config;
  }

  // Passes gradients with a learning rate that identifies the step. Returns the
  // learning rate of the resulting update, or 0 if there is no update.
  static float Apply(Trainer* trainer, int32_t replica, float rate,
                     bool succeeds = true) {
    BatchGradients gradients;
    const auto values = std::make_shared<Values>(RandomGradients(*trainer, 0));
    for (const std::vector<float>& value : *values) {
      gradients.features.push_back(value);
    }
    gradients.keep_alive = values;
    gradients.hyperparameters = {{rate}, {rate}};
    std::shared_ptr<HostEngine::Step> step;
    ExpectOk(
        trainer->engine().BeginApply(replica, std::move(gradients), &step));
    if (step == nullptr) return 0;
    trainer->engine().FinishApply(replica, succeeds);
    return step->hyperparameters[0][0];
  }

  static float Land(Trainer* trainer, bool always, bool succeeds = true) {
    std::shared_ptr<HostEngine::Step> step;
    ExpectOk(trainer->engine().BeginLanding(0, always, &step));
    if (step == nullptr) return 0;
    trainer->engine().FinishLanding(succeeds);
    return step->hyperparameters[0][0];
  }
};

TEST_F(PipelinedTest, EachUpdateIsAppliedWithTheGradientsOfTheNextStep) {
  Trainer trainer(Config(2));
  const float expected[] = {0, 1, 2, 3};
  for (int step = 0; step < 4; ++step) {
    for (int32_t r : {0, 1}) {
      ExpectOk(trainer.Enqueue(r, RandomBatchFor(trainer, 0)));
    }
    for (int32_t r : {0, 1}) ExpectOk(trainer.Dequeue(r));
    EXPECT_EQ(Apply(&trainer, 1, 100), 0);
    EXPECT_EQ(Apply(&trainer, 0, step + 1), expected[step]);
    EXPECT_EQ(trainer.engine().Describe().num_updates, step);
    EXPECT_TRUE(trainer.engine().Describe().is_held);
  }
  EXPECT_EQ(Land(&trainer, true), 4);
  EXPECT_EQ(Land(&trainer, true), 0);
  EXPECT_EQ(trainer.engine().Describe().num_updates, 4);
  EXPECT_FALSE(trainer.engine().Describe().is_held);
}

TEST_F(PipelinedTest, AForwardOnlyStepRequiresTheDeferredUpdate) {
  Trainer trainer(Config(1));
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
  ExpectOk(trainer.Dequeue(0));
  EXPECT_EQ(Apply(&trainer, 0, 1), 0);
  EXPECT_EQ(Land(&trainer, false), 0);  // There is no next step.
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
  EXPECT_EQ(Land(&trainer, false),
            0);  // A training step may use rows before the update.
  ExpectOk(trainer.Dequeue(0));
  EXPECT_EQ(Apply(&trainer, 0, 2), 1);
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0), false));
  EXPECT_EQ(trainer.Dequeue(0).code(), Code::kNotYet);
  EXPECT_EQ(Land(&trainer, false), 2);
  ExpectOk(trainer.Dequeue(0));
}

TEST_F(PipelinedTest, AFailedUpdateIsRetried) {
  Trainer trainer(Config(1));
  for (int step = 0; step < 2; ++step) {
    ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
  }
  ExpectOk(trainer.Dequeue(0));
  EXPECT_EQ(Apply(&trainer, 0, 1), 0);
  EXPECT_EQ(Land(&trainer, true, false), 1);
  ExpectOk(trainer.Dequeue(0));
  EXPECT_EQ(Apply(&trainer, 0, 2, false), 1);
  EXPECT_TRUE(trainer.engine().Describe().awaiting[0]);
  EXPECT_EQ(Apply(&trainer, 0, 3), 1);
  EXPECT_EQ(Land(&trainer, true), 3);
}

TEST_F(PipelinedTest, OnlyOneUpdateIsAppliedAtATime) {
  Trainer trainer(Config(1));
  for (int step = 0; step < 2; ++step) {
    ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
  }
  ExpectOk(trainer.Dequeue(0));
  Apply(&trainer, 0, 1);
  std::shared_ptr<HostEngine::Step> step, other;
  ExpectOk(trainer.engine().BeginLanding(0, true, &step));
  EXPECT_EQ(trainer.engine().BeginLanding(0, true, &other).code(),
            Code::kNotYet);
  EXPECT_EQ(trainer.Dequeue(0).code(), Code::kNotYet);
  trainer.engine().Reset();
  trainer.engine().FinishLanding(true);
  EXPECT_FALSE(trainer.engine().Describe().is_held);
  EXPECT_EQ(trainer.engine().Describe().num_updates, 0);
}

TEST_F(PipelinedTest, TheNextStepIsFoundBetweenDequeueAndApply) {
  Trainer trainer(Config(1));
  HostEngine& engine = trainer.engine();
  std::shared_ptr<const Batch> batch;
  int64_t num_updates = -1;
  const auto find = [&] {
    batch = nullptr;
    ExpectOk(engine.FindNext(0, &batch, &num_updates));
    return batch != nullptr;
  };
  EXPECT_FALSE(find());  // No step is dequeued.
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
  ExpectOk(trainer.Dequeue(0));
  EXPECT_FALSE(find());  // The next step is not enqueued.
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
  EXPECT_TRUE(find());
  EXPECT_EQ(num_updates, 0);
  Apply(&trainer, 0, 1);
  EXPECT_FALSE(find());  // The current step has its gradients.
  ExpectOk(trainer.Dequeue(0));
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
  EXPECT_FALSE(find());  // The update of the first step is deferred.
  EXPECT_EQ(Land(&trainer, true), 1);
  EXPECT_TRUE(find());
  EXPECT_EQ(num_updates, 1);
  EXPECT_EQ(engine.num_updates(), 1);
  Apply(&trainer, 0, 2);
  ExpectOk(trainer.Dequeue(0));
  Land(&trainer, true);
  EXPECT_EQ(engine.num_updates(), 2);
  ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0), false));
  EXPECT_FALSE(find());  // A forward-only step reads all updates.
  EXPECT_EQ(engine.FindNext(1, &batch, &num_updates).code(),
            Code::kInvalidArgument);
}

TEST_F(PipelinedTest, EachReplicaHasItsOwnNextStep) {
  Trainer trainer(Config(2));
  for (int step = 0; step < 2; ++step) {
    for (int32_t r : {0, 1}) {
      ExpectOk(trainer.Enqueue(r, RandomBatchFor(trainer, 0)));
    }
  }
  std::shared_ptr<const Batch> batch;
  int64_t num_updates;
  ExpectOk(trainer.Dequeue(0));
  ExpectOk(trainer.engine().FindNext(0, &batch, &num_updates));
  EXPECT_NE(batch, nullptr);
  batch = nullptr;
  ExpectOk(trainer.engine().FindNext(1, &batch, &num_updates));
  EXPECT_EQ(batch, nullptr);
}

TEST(HostEngineTest, AnEngineWithoutPipeliningHasNoNextStep) {
  Trainer trainer(TestConfig(1));
  for (int step = 0; step < 2; ++step) {
    ExpectOk(trainer.Enqueue(0, RandomBatchFor(trainer, 0)));
  }
  ExpectOk(trainer.Dequeue(0));
  std::shared_ptr<const Batch> batch;
  int64_t num_updates;
  ExpectOk(trainer.engine().FindNext(0, &batch, &num_updates));
  EXPECT_EQ(batch, nullptr);
}

TEST(HostEngineTest, SamplesIdsAndUniqueRowsAreCounted) {
  Trainer trainer(TestConfig(1));
  TestBatch batch(3);
  batch[0].ids = {{1, 1}, {2}};
  batch[1].ids = {{1, 2, 3}, {}};
  batch[2].ids = {{1}, {}};
  ExpectOk(trainer.Enqueue(0, batch));
  const HostEngine::Description found = trainer.engine().Describe();
  EXPECT_EQ(found.features[0].num_samples, 2);
  EXPECT_EQ(found.features[0].ids.num_ids, 3);
  EXPECT_EQ(found.features[1].ids.num_truncated, 1);
  EXPECT_EQ(found.tables[0].num_lookups, 4);
  EXPECT_EQ(found.tables[0].num_unique_rows, 2);
  EXPECT_EQ(found.tables[1].num_lookups, 2);
}

}  // namespace
}  // namespace layoutmap
