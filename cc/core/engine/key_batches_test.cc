#include "cc/core/engine/key_batches.h"

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cc/core/engine/engine_test.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/engine/token_steps.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/policy.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"
#include "cc/core/tables/table_test.h"
#include "cc/core/vocabulary/vocabulary_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

// Batches of two replicas with one sample each, for the features of TestConfig.
// The features `clicked` (mean) and `shown` (sum) use table 0. The feature
// `text`, a sequence of length 2, uses table 1.
class KeyBatchesTest : public testing::Test {
 protected:
  KeyBatchesTest() : config_(TestConfig(2)) {}

  Status Make(const std::vector<std::vector<std::vector<int64_t>>>& ids,
              KeyBatches* made) {
    ids_ = ids;
    splits_.clear();
    inputs_.assign(ids.size(), {});
    for (const auto& replica : ids_) {
      for (const auto& feature : replica) {
        splits_.push_back({0, static_cast<int64_t>(feature.size())});
      }
    }
    size_t next = 0;
    for (size_t r = 0; r < ids_.size(); ++r) {
      for (const std::vector<int64_t>& feature : ids_[r]) {
        FeatureInput<int64_t> input;
        input.ids = feature;
        input.splits = splits_[next++];
        input.num_samples = 1;
        inputs_[r].push_back(input);
      }
    }
    return KeyBatches::Make(config_, {true, true}, inputs_, made);
  }

  static std::vector<int64_t> KeysOf(const KeyBatches& batches, int32_t table) {
    const TableKeys found = batches.KeysOf(table);
    return {found.keys.begin(), found.keys.end()};
  }

  // Returns gradients with the shapes of one replica's activations. All values
  // are one.
  static BatchGradients GradientsOfOnes() {
    static const std::vector<float> ones(10, 1.0f);
    BatchGradients gradients;
    for (int64_t size : {3, 10, 3}) {
      gradients.features.push_back({ones.data(), size});
    }
    return gradients;
  }

  EngineConfig config_;
  std::vector<std::vector<std::vector<int64_t>>> ids_;
  std::vector<std::vector<int64_t>> splits_;
  std::vector<std::vector<FeatureInput<int64_t>>> inputs_;
};

TEST_F(KeyBatchesTest, KeysAreOrderedByFeatureThenByReplica) {
  KeyBatches batches;
  ASSERT_TRUE(
      Make({{{-7, 900}, {1, 2, 3}, {5}}, {{8}, {4}, {6, 900}}}, &batches).ok());
  EXPECT_EQ(KeysOf(batches, 0), (std::vector<int64_t>{-7, 900, 8, 5, 6, 900}));
  // The maximum sequence length is two, so the third key is not used.
  EXPECT_EQ(KeysOf(batches, 1), (std::vector<int64_t>{1, 2, 4}));
}

TEST_F(KeyBatchesTest, KeysOfOneInputAreNotCopied) {
  KeyBatches batches;
  ASSERT_TRUE(Make({{{}, {1}, {5, 6}}, {{}, {}, {}}}, &batches).ok());
  EXPECT_EQ(batches.KeysOf(0).keys.data(), inputs_[0][2].ids.data());
  EXPECT_EQ(KeysOf(batches, 0), (std::vector<int64_t>{5, 6}));
  EXPECT_EQ(KeysOf(batches, 1), (std::vector<int64_t>{1}));
}

TEST_F(KeyBatchesTest, KeysWithoutARowCountInTheMeanAndAreNotUpdated) {
  KeyBatches batches;
  ASSERT_TRUE(
      Make({{{-7, 900}, {1, 2, 3}, {5}}, {{8}, {4}, {6, 900}}}, &batches).ok());
  const std::vector<int64_t> rows = {3, kNoRow, kNoRow, 1, 2, kNoRow};
  const std::vector<int64_t> text = {kNoRow, 6, 5};
  batches.TakeRows(0, rows, kNoRow, 4);
  batches.TakeRows(1, text, 7, 9);
  const std::vector<std::shared_ptr<const Batch>> made = batches.Finish();
  const RaggedIds& clicked = (*made[0])[0];
  ASSERT_EQ(clicked.rows().size(), 1);
  EXPECT_EQ(clicked.rows()[0], 3u);
  EXPECT_EQ(clicked.gains()[0], 0.5f);
  EXPECT_EQ(clicked.vocabulary_step(), 4);
  EXPECT_TRUE((*made[1])[0].rows().empty());
  EXPECT_EQ((*made[1])[0].num_outputs(), 1);
  const RaggedIds& sequence = (*made[0])[1];
  // Row 7 is the row that unknown keys share.
  EXPECT_EQ(sequence.rows()[0], 7u);
  EXPECT_EQ(sequence.rows()[1], 6u);
  EXPECT_EQ(sequence.vocabulary_step(), 9);
}

// The batches contain keys of two features and two replicas. Some keys have no
// row.
TEST_F(KeyBatchesTest, StepsFromGroupsEqualStepsFromTheSort) {
  VocabularyPolicy policy;
  policy.admission = Admission::kCount;
  policy.min_count = 2;
  config_.tables[0].partition =
      MakePartition(Placement::kDiv, EvenOffsets(521, 2));
  std::mt19937 random(4);
  const auto draw = [&](int size) {
    std::vector<int64_t> keys(size);
    for (int64_t& key : keys) key = random() % 700;
    return keys;
  };
  TestVocabulary one(512, policy);
  for (int32_t step = 1; step <= 6; ++step) {
    // In every second step, the batch of one replica is used, to test the
    // groups of a single lookup.
    std::vector<std::vector<std::vector<int64_t>>> ids = {
        {draw(200), {1}, draw(300)}, {draw(90), {}, draw(step == 4 ? 0 : 9)}};
    if (step % 2 == 0) ids.pop_back();
    for (const int64_t unknown_row : {int64_t{kNoRow}, int64_t{520}}) {
      KeyBatches grouped, sorted;
      ASSERT_TRUE(Make(ids, &grouped).ok());
      ASSERT_TRUE(Make(ids, &sorted).ok());
      ASSERT_TRUE(
          one.Admit(KeysOf(grouped, 0), {2 * step + (unknown_row > 0), 1, {}})
              .ok());
      grouped.TakeRows(0, one.rows, unknown_row, step, one.admitted.groups);
      sorted.TakeRows(0, one.rows, unknown_row, step);
      auto batches = grouped.Finish();
      const auto expect_equal = [&](const auto& found, const auto& other) {
        const TableStep step = PrepareTable(config_, 0, found);
        const TableStep expected = PrepareTable(config_, 0, other);
        EXPECT_EQ(step.rows, expected.rows);
        EXPECT_EQ(step.splits, expected.splits);
        EXPECT_EQ(step.gradient_of, expected.gradient_of);
        EXPECT_EQ(step.gains, expected.gains);
      };
      ASSERT_FALSE(PrepareTable(config_, 0, batches).rows.empty());
      expect_equal(batches, sorted.Finish());
      // Tests a lookup whose gradients are passed twice.
      auto twice = sorted.Finish();
      batches.push_back(batches[0]);
      twice.push_back(twice[0]);
      expect_equal(batches, twice);
    }
  }
}

TEST_F(KeyBatchesTest, InvalidBatchesAreRejectedByFeature) {
  KeyBatches batches;
  Status status = Make({{{kEmptyKey}, {}, {}}, {{}, {}, {}}}, &batches);
  EXPECT_NE(status.message().find("'clicked': a key must not be"),
            std::string::npos);
  ASSERT_TRUE(Make({{{1}, {2}, {3}}, {{1}, {2}, {3}}}, &batches).ok());
  inputs_[1].pop_back();
  EXPECT_FALSE(KeyBatches::Make(config_, {true, true}, inputs_, &batches).ok());
}

TEST_F(KeyBatchesTest, RowsOfStepsInFlightAreReported) {
  Trainer trainer(config_);
  TokenSteps tokens(&trainer.engine());
  RowSteps row_steps(&trainer.engine());
  KeyBatches batches;
  const auto enqueue = [&](bool training, int32_t step) {
    ASSERT_TRUE(Make({{{4}, {1}, {2}}, {{3}, {1}, {2}}}, &batches).ok());
    batches.TakeRows(0, std::vector<int64_t>{4, 3, 2, 2}, kNoRow, step);
    batches.TakeRows(1, std::vector<int64_t>{1, 1}, kNoRow, step);
    auto made = batches.Finish();
    for (int32_t r : {0, 1}) {
      ASSERT_TRUE(trainer.engine().CheckEnqueue(r, training).ok());
      ASSERT_TRUE(trainer.engine()
                      .EnqueueBatch(r, training, Status(), made[r], SerialFor)
                      .ok());
    }
  };
  const auto find = [&] {
    return FindRowsInFlight(trainer.engine(), tokens, row_steps, 0);
  };
  EXPECT_EQ(find().oldest_step, INT32_MAX);
  enqueue(true, 5);
  EXPECT_EQ(find().oldest_step, 5);
  EXPECT_TRUE(find().pinned_rows.empty());
  enqueue(false, 0);
  EXPECT_EQ(find().pinned_rows, (std::vector<int64_t>{2, 3, 4}));
  // The queue is full, because two steps are pending.
  EXPECT_FALSE(trainer.engine().CheckEnqueue(0, true).ok());
  trainer.engine().Reset();
  EXPECT_EQ(find().oldest_step, INT32_MAX);
  EXPECT_TRUE(find().pinned_rows.empty());
  ASSERT_TRUE(Make({{{4}, {1}, {2}}, {{3}, {1}, {2}}}, &batches).ok());
  batches.TakeRows(0, std::vector<int64_t>{4, 3, 2, 2}, kNoRow, 8);
  batches.TakeRows(1, std::vector<int64_t>{1, 1}, kNoRow, 8);
  int64_t token;
  ASSERT_TRUE(tokens.Open(0, batches.Finish()[0], &token).ok());
  EXPECT_EQ(find().oldest_step, 8);
  tokens.Reset();
  EXPECT_EQ(find().oldest_step, INT32_MAX);
}

TEST_F(KeyBatchesTest, RowsOfRunningCallsStayInUseAfterAReset) {
  for (const bool is_pipelined : {false, true}) {
    config_.is_pipelined = is_pipelined;
    Trainer trainer(config_);
    HostEngine& engine = trainer.engine();
    TokenSteps tokens(&engine);
    RowSteps row_steps(&engine);
    const auto oldest = [&] {
      return FindRowsInFlight(engine, tokens, row_steps, 0).oldest_step;
    };
    const auto made = [&](int32_t step) {
      KeyBatches batches;
      EXPECT_TRUE(Make({{{4}, {1}, {2}}, {{3}, {1}, {2}}}, &batches).ok());
      batches.TakeRows(0, std::vector<int64_t>{4, 3, 2, 2}, kNoRow, step);
      batches.TakeRows(1, std::vector<int64_t>{1, 1}, kNoRow, step);
      return batches.Finish();
    };
    std::shared_ptr<const Batch> batch;
    std::shared_ptr<HostEngine::Step> update;
    // In a pipelined engine, the second step returns the update of the first
    // step.
    for (int32_t step = 5; step < 5 + 1 + is_pipelined; ++step) {
      auto batches = made(step);
      for (int32_t r : {0, 1}) {
        ASSERT_TRUE(
            engine.EnqueueBatch(r, true, Status(), batches[r], SerialFor).ok());
      }
      batches.clear();
      for (int32_t r : {0, 1}) {
        ASSERT_TRUE(engine.BeginDequeue(r, &batch).ok());
        engine.FinishDequeue(r, true);
        batch = nullptr;
      }
      for (int32_t r : {0, 1}) {
        ASSERT_TRUE(engine.BeginApply(r, GradientsOfOnes(), &update).ok());
      }
    }
    ASSERT_NE(update, nullptr);
    engine.Reset();
    EXPECT_EQ(oldest(), 5);
    engine.FinishApply(1, true);
    update = nullptr;
    EXPECT_EQ(oldest(), INT32_MAX);

    auto batches = made(9);
    for (int32_t r : {0, 1}) {
      ASSERT_TRUE(
          engine.EnqueueBatch(r, true, Status(), batches[r], SerialFor).ok());
    }
    batches.clear();
    ASSERT_TRUE(engine.BeginDequeue(0, &batch).ok());
    engine.Reset();
    EXPECT_EQ(oldest(), 9);
    batch = nullptr;
    EXPECT_EQ(oldest(), INT32_MAX);

    int64_t token;
    ASSERT_TRUE(tokens.Open(0, made(12)[0], &token).ok());
    ASSERT_TRUE(tokens.Find(0, token, &batch).ok());
    tokens.Reset();
    EXPECT_EQ(oldest(), 12);
    batch = nullptr;
    EXPECT_EQ(oldest(), INT32_MAX);
  }
}

}  // namespace
}  // namespace layoutmap
