#include "cc/core/optimizers/apply.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/parallel_for_test.h"
#include "cc/core/base/status.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/simd/all_kernels_test.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/core/tables/table_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

constexpr float kRate = 0.3f;

// The unique rows of a test step with their positions, and the gradients of
// `num_samples` samples.
struct Step {
  std::vector<uint32_t> rows;
  std::vector<int64_t> splits{0};
  std::vector<uint32_t> gradient_of;
  std::vector<float> gains;
  std::vector<float> values;
  std::vector<const float*> gradient_rows;

  RowGradients View(bool with_gains) const {
    RowGradients view;
    view.rows = rows;
    view.splits = splits;
    view.gradient_of = gradient_of;
    if (with_gains) view.gains = gains;
    view.gradient_rows = gradient_rows;
    return view;
  }
};

// Returns a step that contains each row below `num_rows` with a probability of
// 1 / `sparsity`.
Step RandomStep(int64_t num_rows, int sparsity, int64_t dim, uint32_t seed) {
  constexpr int64_t kNumSamples = 9;
  std::mt19937 random(seed);
  Step step;
  for (int64_t row = 0; row < num_rows; ++row) {
    if (random() % sparsity != 0) continue;
    step.rows.push_back(row);
    // Most rows have a few positions. Some rows have 300 positions.
    const int64_t count = random() % 20 ? 1 + random() % 4 : 300;
    for (int64_t i = 0; i < count; ++i) {
      step.gradient_of.push_back(random() % kNumSamples);
      step.gains.push_back(RandomFloat(&random));
    }
    step.splits.push_back(step.gradient_of.size());
  }
  step.values = RandomFloats(kNumSamples * dim, seed + 1);
  for (int64_t s = 0; s < kNumSamples; ++s) {
    step.gradient_rows.push_back(step.values.data() + s * dim);
  }
  return step;
}

// A table and its accumulators, whose values are positive.
struct Trained {
  TestTable table;
  TestTable accumulators;

  Trained(const RowPartition& partition, int64_t dim, uint32_t seed)
      : table(partition, dim, seed), accumulators(partition, dim, seed + 1) {
    for (std::vector<float>& shard : accumulators.shards()) {
      for (float& value : shard) value = std::fabs(value) + 0.1f;
    }
  }
};

void ReferenceApply(Optimizer optimizer, const Step& step, bool with_gains,
                    Trained* trained) {
  for (size_t u = 0; u < step.rows.size(); ++u) {
    float* row = trained->table.row(step.rows[u]);
    float* accumulator = trained->accumulators.row(step.rows[u]);
    for (int64_t c = 0; c < trained->table.dim(); ++c) {
      float g = 0, squares = 0;
      for (int64_t k = step.splits[u]; k < step.splits[u + 1]; ++k) {
        const float value = step.gradient_rows[step.gradient_of[k]][c];
        const float gained = with_gains ? step.gains[k] * value : value;
        g += gained;
        squares += gained * gained;
      }
      if (optimizer == Optimizer::kSgd) {
        row[c] -= kRate * g;
      } else {
        accumulator[c] += optimizer == Optimizer::kAdagrad ? g * g : squares;
        row[c] -= kRate * g / std::sqrt(accumulator[c]);
      }
    }
  }
}

void Apply(Optimizer optimizer, const Step& step, bool with_gains,
           const RowKernels& kernels, const ParallelFor& parallel_for,
           Trained* trained) {
  const std::vector<float> hyperparameters = {kRate};
  std::vector<ShardedView<float>> slots;
  if (NumSlots(optimizer) == 1) {
    slots.push_back(trained->accumulators.MutableView());
  }
  ApplyGradients(optimizer, hyperparameters, step.View(with_gains),
                 trained->table.MutableView(), slots, kernels, parallel_for);
}

void ExpectBitwiseEqual(const TestTable& actual, const TestTable& expected) {
  ASSERT_EQ(actual.shards().size(), expected.shards().size());
  for (size_t s = 0; s < actual.shards().size(); ++s) {
    const std::vector<float>& a = actual.shards()[s];
    const std::vector<float>& e = expected.shards()[s];
    ASSERT_EQ(a.size(), e.size());
    if (a.empty()) continue;
    ASSERT_EQ(std::memcmp(a.data(), e.data(), a.size() * sizeof(float)), 0)
        << "shard " << s;
  }
}

// Compares SGD and both versions of Adagrad with the reference, with and
// without gains, for every CPU level, and for 1, 2 and 8 workers. A step must
// not change other rows.
void ExpectMatchesReference(const RowPartition& partition, int64_t dim,
                            const Step& step) {
  for (Optimizer optimizer :
       {Optimizer::kSgd, Optimizer::kAdagrad, Optimizer::kAdagradPerId}) {
    for (bool with_gains : {false, true}) {
      Trained expected(partition, dim, dim);
      ReferenceApply(optimizer, step, with_gains, &expected);
      for (const NamedKernels& kernels : AllKernels()) {
        for (int num_workers : {1, 2, 8}) {
          SCOPED_TRACE(testing::Message()
                       << "optimizer " << static_cast<int>(optimizer)
                       << ", dim " << dim << ", " << kernels.name << ", "
                       << num_workers << " workers, gains " << with_gains);
          Trained trained(partition, dim, dim);
          Apply(optimizer, step, with_gains, kernels.rows,
                UnevenFor(num_workers, dim), &trained);
          ExpectBitwiseEqual(trained.table, expected.table);
          ExpectBitwiseEqual(trained.accumulators, expected.accumulators);
        }
      }
    }
  }
}

TEST(ApplyTest, ResultsAreBitwiseIdenticalForEveryDimLevelAndNumberOfWorkers) {
  const RowPartition partition =
      MakePartition(Placement::kDiv, EvenOffsets(29, 3));
  for (int64_t dim = 1; dim <= 130; ++dim) {
    ExpectMatchesReference(partition, dim, RandomStep(29, 2, dim, dim));
  }
}

// Compares all variants of every update rule, with and without modifiers, and
// with updates of rows that were not looked up. The expected result is computed
// by one worker at the baseline CPU level.
TEST(ApplyTest, NoRuleDependsOnLevelOrNumberOfWorkers) {
  struct Case {
    Optimizer optimizer;
    std::vector<float> hyperparameters;
    bool takes_modifiers = true;
  };
  const std::vector<Case> cases = {
      {Optimizer::kAdagradMomentum, {0.1f, 0.9f, 0, 2.0f, 0.99f, 1e-6f}},
      {Optimizer::kAdagradMomentum, {0.1f, 0.9f, 1, 3.0f, 1.0f, 1e-6f}},
      {Optimizer::kAdam, {0.1f, 0.9f, 0.99f, 1e-6f, 0, 1}},
      {Optimizer::kAdam, {0.1f, 0.9f, 0.99f, 1e-6f, 1, 0}},
      {Optimizer::kFtrl, {0.1f, -0.5f, 0.01f, 0.02f, 0.1f, 0}},
      {Optimizer::kFtrl, {0.1f, -0.3f, 0.01f, 0.02f, 0.1f, 1}},
      {Optimizer::kAdamPerId, {0.1f, 0.9f, 0.99f, 1e-6f, 0, 1}, false},
      {Optimizer::kFtrlPerId, {0.1f, -0.5f, 0.01f, 0.02f, 0.1f, 0}, false},
      {Optimizer::kMomentum, {0.1f, 0.9f, 0}},
      {Optimizer::kMomentum, {0.1f, 0.9f, 1}},
      {Optimizer::kRmsprop, {0.1f, 0.9f, 1e-6f}},
      {Optimizer::kRmspropPerId, {0.1f, 0.9f, 1e-6f}, false},
      {Optimizer::kRowwiseAdagrad, {0.1f, 1e-6f}},
      {Optimizer::kLamb, {0.1f, 0.9f, 0.99f, 1e-6f, 0.1f}},
  };
  const std::vector<float> modifiers = {-0.5f, 0.5f, 0.01f, 1, -0.9f, 0.9f, 1};
  const RowPartition partition =
      MakePartition(Placement::kDiv, EvenOffsets(29, 3));
  for (const Case& c : cases) {
    for (bool modified : {false, true}) {
      if (modified && !c.takes_modifiers) continue;
      std::vector<float> hyperparameters = c.hyperparameters;
      if (modified) {
        hyperparameters.insert(hyperparameters.end(), modifiers.begin(),
                               modifiers.end());
      }
      const Status checked =
          CheckHyperparameters(c.optimizer, "ads", hyperparameters);
      ASSERT_TRUE(checked.ok()) << checked.message();
      for (int64_t dim = 1; dim <= 130; dim += dim < 40 ? 1 : 9) {
        const Step step = RandomStep(29, 2, dim, dim);
        std::vector<std::vector<float>> expected;
        for (const NamedKernels& kernels : AllKernels()) {
          for (int num_workers : {1, 2, 8}) {
            std::vector<TestTable> tables;
            for (int j = 0; j <= NumSlots(c.optimizer); ++j) {
              tables.emplace_back(
                  partition, j == 0 ? dim : SlotDim(c.optimizer, j - 1, dim),
                  dim + j);
              for (std::vector<float>& shard : tables[j].shards()) {
                // The values of slot variables must be positive.
                for (float& x : shard) x = j == 0 ? x : std::fabs(x) + 0.1f;
              }
            }
            std::vector<ShardedView<float>> slots;
            for (size_t j = 1; j < tables.size(); ++j) {
              slots.push_back(tables[j].MutableView());
            }
            ApplyGradients(c.optimizer, hyperparameters, step.View(true),
                           tables[0].MutableView(), slots, kernels.rows,
                           UnevenFor(num_workers, dim));
            std::vector<std::vector<float>> found;
            for (TestTable& table : tables) {
              for (const std::vector<float>& shard : table.shards()) {
                found.push_back(shard);
              }
            }
            if (expected.empty()) expected = found;
            ASSERT_EQ(found, expected)
                << "optimizer " << static_cast<int>(c.optimizer) << ", dim "
                << dim << ", " << kernels.name << ", " << num_workers
                << " workers";
          }
        }
        for (const std::vector<float>& shard : expected) {
          for (float x : shard) ASSERT_TRUE(std::isfinite(x));
        }
      }
    }
  }
}

TEST(ApplyTest, EveryPlacementUpdatesTheRightRows) {
  for (int64_t num_shards : {1, 2, 5, 40}) {
    for (Placement placement : {Placement::kDiv, Placement::kMod}) {
      ExpectMatchesReference(
          MakePartition(placement, EvenOffsets(31, num_shards)), 6,
          RandomStep(31, 2, 6, num_shards));
    }
  }
  ExpectMatchesReference(
      MakePartition(Placement::kOffsets, {0, 0, 4, 4, 16, 31, 31}), 6,
      RandomStep(31, 2, 6, 9));
}

TEST(ApplyTest, UpdatesCanHaveMoreRowsThanATile) {
  ExpectMatchesReference(MakePartition(Placement::kMod, EvenOffsets(3000, 4)),
                         5, RandomStep(3000, 1, 5, 3));
}

TEST(ApplyTest, UpdatesOfOneRowAndOfNoRow) {
  const RowPartition partition =
      MakePartition(Placement::kDiv, EvenOffsets(1, 1));
  ExpectMatchesReference(partition, 33, RandomStep(1, 1, 33, 1));
  ExpectMatchesReference(partition, 33, Step());
}

TEST(ApplyTest, ExtremeFloatsAreUpdatedUnchanged) {
  const RowPartition partition =
      MakePartition(Placement::kDiv, EvenOffsets(3, 1));
  Step step = RandomStep(3, 1, 21, 5);
  for (size_t i = 0; i < step.values.size(); ++i) {
    const float edges[] = {1e-41f, -1e-40f, 1e-22f, -0.0f, 1e30f};
    step.values[i] = edges[i % 5];
  }
  ExpectMatchesReference(partition, 21, step);
}

TEST(ApplyTest, OptimizersAreParsedByName) {
  Optimizer optimizer;
  EXPECT_TRUE(ParseOptimizer("none", &optimizer).ok());
  EXPECT_EQ(optimizer, Optimizer::kNone);
  EXPECT_EQ(NumSlots(optimizer), 0);
  EXPECT_TRUE(ParseOptimizer("sgd", &optimizer).ok());
  EXPECT_EQ(optimizer, Optimizer::kSgd);
  EXPECT_EQ(NumSlots(optimizer), 0);
  EXPECT_TRUE(ParseOptimizer("adagrad", &optimizer).ok());
  EXPECT_EQ(optimizer, Optimizer::kAdagrad);
  EXPECT_EQ(NumSlots(optimizer), 1);
  EXPECT_NE(ParseOptimizer("lars", &optimizer).message().find("lars"),
            std::string::npos);
}

TEST(ApplyTest, RejectsInvalidHyperparameters) {
  const auto error_message = [](Optimizer optimizer,
                                const std::vector<float>& values) {
    const Status status = CheckHyperparameters(optimizer, "ads", values);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return status.message();
  };
  for (Optimizer optimizer : {Optimizer::kSgd, Optimizer::kAdagrad}) {
    for (float bad : {-1.0f, std::numeric_limits<float>::quiet_NaN(),
                      std::numeric_limits<float>::infinity()}) {
      EXPECT_NE(error_message(optimizer, {bad})
                    .find("Table 'ads': the learning rate must be finite"),
                std::string::npos);
    }
    EXPECT_NE(error_message(optimizer, {}).find("takes 1 hyperparameters"),
              std::string::npos);
    EXPECT_NE(error_message(optimizer, {1, 2}).find("Received: 2"),
              std::string::npos);
    EXPECT_TRUE(
        CheckHyperparameters(optimizer, "ads", std::vector<float>{0}).ok());
  }
  EXPECT_NE(
      error_message(Optimizer::kNone, {1}).find("takes 0 hyperparameters"),
      std::string::npos);
  EXPECT_TRUE(CheckHyperparameters(Optimizer::kNone, "ads", {}).ok());
  // This rule has no modifiers.
  EXPECT_NE(error_message(Optimizer::kAdagradPerId,
                          std::vector<float>(1 + kNumModifiers, 0.5f))
                .find("takes 1 hyperparameters"),
            std::string::npos);
}

}  // namespace
}  // namespace layoutmap
