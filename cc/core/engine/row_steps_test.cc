#include "cc/core/engine/row_steps.h"

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/engine/engine_test.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/steps/step.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

using Rows = std::vector<int64_t>;
// The rows of a gradient, whose memory the test owns.
using Gradient = std::shared_ptr<Rows>;

EngineConfig OneTable() {
  EngineConfig config;
  config.num_replicas = 1;
  config.max_pending_steps = 2;
  config.tables.resize(1);
  config.tables[0].name = "words";
  config.tables[0].partition =
      MakePartition(Placement::kDiv, EvenOffsets(8, 2));
  config.tables[0].dim = 2;
  config.tables[0].optimizer = Optimizer::kSgd;
  FeatureSpec feature;
  feature.feature = feature.table = "words";
  feature.num_rows = 8;
  config.features.push_back(feature);
  config.table_of_feature.push_back(0);
  return config;
}

class RowStepsTest : public ::testing::Test {
 protected:
  RowStepsTest() : trainer(OneTable()), steps(&trainer.engine()) {}

  int64_t Open(const Rows& rows) {
    FeatureInput<int64_t> input;
    input.form = Form::kDense;
    input.ids = rows;
    input.num_samples = rows.size();
    auto batch = std::make_shared<Batch>(1);
    EXPECT_TRUE(
        RaggedIds::Make(trainer.config().features[0], input, &(*batch)[0])
            .ok());
    int64_t token = 0;
    EXPECT_TRUE(steps.Open(batch, &token).ok());
    return token;
  }

  Gradient Record(const Rows& rows) {
    auto gradient = std::make_shared<Rows>(rows);
    RowSteps::RecordedRows record;
    record.rows = *gradient;
    record.is_shared = [gradient] { return gradient.use_count() > 1; };
    steps.Record(std::move(record));
    return gradient;
  }

  // Returns the gradient of a new lookup of `rows`.
  Gradient Compute(const Rows& rows) {
    EXPECT_TRUE(steps.Mark(Open(rows)).ok());
    return Record(rows);
  }

  std::string Apply(const Rows& rows, std::vector<float> values = {},
                    bool is_dense = false) {
    if (values.empty()) values.assign(2 * rows.size(), 1.0f);
    RowSteps::Gradient gradient;
    gradient.rows = rows;
    gradient.values = values;
    gradient.is_dense = is_dense;
    std::vector<int64_t> records;
    const Status status = steps.BeginApply(gradient, &records);
    if (status.ok()) steps.FinishApply(records, {}, true);
    return status.message();
  }

  // Applies a dense gradient that is not zero in `rows`.
  std::string ApplyDense(const Rows& rows) {
    std::vector<float> values(16, 0.0f);
    for (const int64_t row : rows) values[2 * row + 1] = 1.0f;
    return Apply({0, 1, 2, 3, 4, 5, 6, 7}, values, true);
  }

  std::set<int64_t> InFlight() const {
    std::set<int64_t> rows;
    steps.VisitInFlight([&](const Batch& batch) {
      rows.insert(batch[0].rows().begin(), batch[0].rows().end());
    });
    return rows;
  }

  Trainer trainer;
  RowSteps steps;
};

TEST_F(RowStepsTest, RowsAreInFlightUntilTheirGradientIsApplied) {
  const Gradient first = Compute({1, 2, 1});
  const Gradient second = Compute({2, 5});
  Open({7});
  EXPECT_EQ(InFlight(), (std::set<int64_t>{1, 2, 5, 7}));
  EXPECT_EQ(Apply(*first), "");
  EXPECT_EQ(InFlight(), (std::set<int64_t>{2, 5, 7}));
  EXPECT_EQ(Apply(*second), "");
  EXPECT_EQ(InFlight(), (std::set<int64_t>{7}));
  EXPECT_EQ(steps.NumRecorded(), 0);
  EXPECT_EQ(trainer.engine().Describe().num_updates, 2);
}

TEST_F(RowStepsTest, AGradientIsIdentifiedByItsMemory) {
  const Gradient first = Compute({3});
  const Gradient second = Compute({3});
  EXPECT_EQ(Apply(*second), "");
  EXPECT_EQ(Apply(*first), "");
  Open({4});
  EXPECT_NE(Apply(*second).find("already applied"), std::string::npos);
  // A copy has no record any more.
  EXPECT_NE(Apply(Rows(*first)).find("no lookup with a pending gradient"),
            std::string::npos);
}

TEST_F(RowStepsTest, AGradientIsAppliedAgainUntilRowsMayBeAssigned) {
  for (const bool visits : {false, true}) {
    steps.Reset();
    const int64_t token = Open({3, 1});
    ASSERT_TRUE(steps.Mark(token).ok());
    const Gradient gradient = Record({3, 1});
    EXPECT_EQ(Apply(*gradient), "");
    EXPECT_EQ(steps.NumRecorded(), 0);
    EXPECT_EQ(Apply(*gradient), "");
    // A copy may belong to an expired lookup of other keys.
    EXPECT_NE(Apply(Rows(*gradient)), "");
    EXPECT_NE(ApplyDense({1, 3}), "");
    // Another gradient of the same lookup.
    ASSERT_TRUE(steps.Mark(token).ok());
    const Gradient second = Record({3, 1});
    EXPECT_EQ(Apply(*second), "");
    EXPECT_EQ(Apply(*gradient), "");
    if (visits) {
      EXPECT_TRUE(InFlight().empty());
    } else {
      Open({5});
    }
    for (const Gradient& one : {gradient, second}) {
      EXPECT_NE(Apply(*one).find("already applied"), std::string::npos);
    }
    EXPECT_FALSE(steps.Mark(token).ok());
  }
}

// Rows of a running update stay assigned to their keys.
TEST_F(RowStepsTest, RowsAreInFlightDuringASecondUpdate) {
  const Gradient gradient = Compute({3});
  EXPECT_EQ(Apply(*gradient), "");
  std::vector<float> values(2, 1.0f);
  RowSteps::Gradient again;
  again.rows = *gradient;
  again.values = values;
  std::vector<int64_t> records;
  ASSERT_TRUE(steps.BeginApply(again, &records).ok());
  EXPECT_EQ(InFlight(), (std::set<int64_t>{3}));
  steps.FinishApply(records, {}, true);
  EXPECT_TRUE(InFlight().empty());
  EXPECT_NE(Apply(*gradient), "");
}

TEST_F(RowStepsTest, AReplacedLookupStaysInFlightDuringASecondUpdate) {
  const Gradient gradient = Compute({3});
  EXPECT_EQ(Apply(*gradient), "");
  std::vector<float> values(2, 1.0f);
  RowSteps::Gradient again;
  again.rows = *gradient;
  again.values = values;
  std::vector<int64_t> records;
  ASSERT_TRUE(steps.BeginApply(again, &records).ok());
  Open({5});
  steps.Reset();
  EXPECT_EQ(InFlight(), (std::set<int64_t>{3}));
  EXPECT_NE(Apply(*gradient), "");
  steps.FinishApply(records, {}, true);
  EXPECT_TRUE(InFlight().empty());
}

TEST_F(RowStepsTest, AnAppliedLookupIsInFlightWhileItsGradientIsComputed) {
  const int64_t token = Open({3});
  ASSERT_TRUE(steps.Mark(token).ok());
  EXPECT_EQ(Apply(*Record({3})), "");
  ASSERT_TRUE(steps.Mark(token).ok());
  EXPECT_EQ(InFlight(), (std::set<int64_t>{3}));
  Open({5});
  const Gradient second = Record({3});
  EXPECT_EQ(Apply(*second), "");
  EXPECT_EQ(InFlight(), (std::set<int64_t>{5}));
}

TEST_F(RowStepsTest, GradientsWithChangedRowsAreAppliedAgain) {
  const Gradient first = Compute({1, 2});
  const Gradient second = Compute({4});
  const Gradient third = Compute({1, 2, 4, 6});
  const Gradient fourth = Compute({3, 5});
  for (int i = 0; i < 3; ++i) {
    // The sum of two gradients. The second call does not match `third`.
    EXPECT_EQ(Apply({1, 2, 4}), "");
    EXPECT_EQ(steps.NumRecorded(), 2);
  }
  for (int i = 0; i < 2; ++i) {
    // A part of a gradient.
    EXPECT_EQ(Apply({5}), "");
    EXPECT_EQ(steps.NumRecorded(), 1);
  }
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(ApplyDense({1, 6}), "");
    EXPECT_EQ(steps.NumRecorded(), 0);
  }
  // Other values, and another row.
  EXPECT_NE(Apply({5}, {1.0f, 2.0f}), "");
  EXPECT_NE(Apply({3}).find("again before the next lookup"), std::string::npos);
  Open({7});
  EXPECT_NE(Apply({5}), "");
  EXPECT_NE(ApplyDense({1, 6}), "");
}

// A program may never make another lookup.
TEST_F(RowStepsTest, TheNumberOfAppliedGradientsIsBounded) {
  const int64_t token = Open({3});
  std::vector<Gradient> gradients;
  for (int64_t i = 0; i < RowSteps::kMaxOpen + 1; ++i) {
    ASSERT_TRUE(steps.Mark(token).ok());
    gradients.push_back(Record({3}));
    EXPECT_EQ(Apply(*gradients.back()), "");
  }
  EXPECT_EQ(Apply(*gradients[1]), "");
  EXPECT_NE(Apply(*gradients[0]).find("64 newer"), std::string::npos);
}

TEST_F(RowStepsTest, OneLookupMayHaveSeveralGradients) {
  const int64_t token = Open({3});
  ASSERT_TRUE(steps.Mark(token).ok());
  const Gradient first = Record({3});
  ASSERT_TRUE(steps.Mark(token).ok());
  const Gradient second = Record({3});
  EXPECT_EQ(Apply(*first), "");
  EXPECT_EQ(InFlight(), (std::set<int64_t>{3}));
  EXPECT_FALSE(steps.Mark(token).ok());
  EXPECT_EQ(Apply(*second), "");
  EXPECT_TRUE(InFlight().empty());
}

TEST_F(RowStepsTest, ChangedRowsAreComparedWithTheRecords) {
  const Gradient first = Compute({1, 2});
  const Gradient second = Compute({4, 4});
  const Gradient third = Compute({6});
  // Part of the rows of one gradient.
  EXPECT_EQ(Apply({2}), "");
  EXPECT_EQ(InFlight(), (std::set<int64_t>{4, 6}));
  // The sum of two gradients.
  EXPECT_EQ(Apply({6, 4}), "");
  EXPECT_TRUE(InFlight().empty());
  const Gradient fourth = Compute({1, 2});
  EXPECT_NE(Apply({1, 3}).find("no lookup with a pending gradient"),
            std::string::npos);
  EXPECT_EQ(InFlight(), (std::set<int64_t>{1, 2}));
}

TEST_F(RowStepsTest, DenseGradientsAreComparedByTheirNonzeroRows) {
  const Gradient first = Compute({1, 2});
  const Gradient second = Compute({4});
  EXPECT_EQ(ApplyDense({1, 2}), "");
  EXPECT_EQ(InFlight(), (std::set<int64_t>{4}));
  // Values may be added to all rows.
  EXPECT_EQ(ApplyDense({0, 1, 2, 3, 4, 5, 6, 7}), "");
  EXPECT_TRUE(InFlight().empty());
  EXPECT_NE(ApplyDense({4}), "");
  const Gradient third = Compute({5, 6});
  EXPECT_EQ(ApplyDense({}), "");
  EXPECT_TRUE(InFlight().empty());
}

TEST_F(RowStepsTest, OldLookupsAndGradientsExpire) {
  const Gradient old = Compute({1});
  for (int64_t i = 0; i < RowSteps::kKeptBehind; ++i) {
    EXPECT_EQ(Apply(*Compute({2})), "");
  }
  EXPECT_EQ(InFlight(), (std::set<int64_t>{1}));
  EXPECT_EQ(Apply(*Compute({2})), "");
  EXPECT_TRUE(InFlight().empty());
  EXPECT_NE(Apply(*old).find("has expired: an update of a lookup"),
            std::string::npos);
  const Gradient second = Compute({1});
  const int64_t token = Open({3});
  std::vector<Gradient> newer;
  for (int64_t i = 0; i < RowSteps::kMaxOpen; ++i) {
    newer.push_back(Compute({2}));
  }
  EXPECT_NE(Apply(*second).find("has expired: 64 newer"), std::string::npos);
  EXPECT_NE(steps.Mark(token).message().find("has expired: 64 newer"),
            std::string::npos);
  EXPECT_EQ(InFlight(), (std::set<int64_t>{2}));
}

TEST_F(RowStepsTest, AResetDiscardsAllLookups) {
  const Gradient gradient = Compute({1});
  const int64_t token = Open({2});
  steps.Reset();
  EXPECT_TRUE(InFlight().empty());
  EXPECT_NE(Apply(*gradient).find("has expired: the steps were reset"),
            std::string::npos);
  EXPECT_FALSE(steps.TakeBack(token).ok());
  const int64_t newest = Open({2});
  EXPECT_TRUE(steps.TakeBack(newest).ok());
  EXPECT_TRUE(InFlight().empty());
}

}  // namespace
}  // namespace layoutmap
