#include "cc/core/ids/combiner.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace layoutmap {
namespace {

std::vector<float> Gains(Combiner combiner, const std::vector<int64_t>& splits,
                         const std::vector<float>& weights) {
  std::vector<float> gains(splits.back(), -7.0f);
  CombineGains(combiner, splits, weights, gains);
  return gains;
}

// Row splits of three samples that have 2, 0 and 4 ids.
const std::vector<int64_t> kSplits = {0, 2, 2, 6};

TEST(CombinerTest, WithoutWeightsEveryIdHasWeightOne) {
  EXPECT_EQ(Gains(Combiner::kSum, kSplits, {}),
            (std::vector<float>{1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(Gains(Combiner::kMean, kSplits, {}),
            (std::vector<float>{0.5, 0.5, 0.25, 0.25, 0.25, 0.25}));
  const float half_root = static_cast<float>(1 / std::sqrt(2.0));
  EXPECT_EQ(Gains(Combiner::kSqrtn, kSplits, {}),
            (std::vector<float>{half_root, half_root, 0.5, 0.5, 0.5, 0.5}));
}

TEST(CombinerTest, WeightsAreNormalizedByTheirSumOrTheirNorm) {
  const std::vector<float> weights = {3, 4, 1, 2, 0, 5};
  EXPECT_EQ(Gains(Combiner::kSum, kSplits, weights), weights);
  EXPECT_EQ(Gains(Combiner::kMean, kSplits, weights),
            (std::vector<float>{3.0f / 7, 4.0f / 7, 0.125, 0.25, 0, 0.625}));
  const std::vector<float> sqrtn = Gains(Combiner::kSqrtn, kSplits, weights);
  EXPECT_EQ(sqrtn[0], 0.6f);
  EXPECT_EQ(sqrtn[1], 0.8f);
  EXPECT_EQ(sqrtn[5], static_cast<float>(5 / std::sqrt(30.0)));
}

TEST(CombinerTest, GainIsZeroIfTheDivisorIsZero) {
  EXPECT_EQ(Gains(Combiner::kMean, {0, 2}, {1, -1}),
            (std::vector<float>{0, 0}));
  EXPECT_EQ(Gains(Combiner::kSqrtn, {0, 2}, {0, 0}),
            (std::vector<float>{0, 0}));
  EXPECT_EQ(Gains(Combiner::kSum, {0, 2}, {1, -1}),
            (std::vector<float>{1, -1}));
}

TEST(CombinerTest, DivisorsAreSummedInDouble) {
  // In float precision, adding 1 to 2^24 returns 2^24.
  std::vector<float> weights(1025, 1.0f);
  weights[0] = 16777216.0f;
  const std::vector<float> gains = Gains(Combiner::kMean, {0, 1025}, weights);
  EXPECT_EQ(gains[1], static_cast<float>(1.0 / (16777216.0 + 1024.0)));
}

TEST(CombinerTest, GainsOfOutputsEqualTheGainsOfTheirIds) {
  std::vector<int64_t> splits = {0};
  for (int64_t size = 0; size < 200; ++size) {
    splits.push_back(splits.back() + size);
  }
  for (Combiner combiner :
       {Combiner::kSum, Combiner::kMean, Combiner::kSqrtn}) {
    const std::vector<float> gains = Gains(combiner, splits, {});
    std::vector<float> of_outputs(splits.size() - 1, -7.0f);
    CombineOutputGains(combiner, splits, of_outputs);
    for (size_t o = 0; o + 1 < splits.size(); ++o) {
      for (int64_t i = splits[o]; i < splits[o + 1]; ++i) {
        EXPECT_EQ(gains[i], of_outputs[o]);
      }
    }
  }
}

TEST(CombinerTest, CombinersAreParsedByName) {
  Combiner combiner;
  EXPECT_TRUE(ParseCombiner("sum", &combiner).ok());
  EXPECT_EQ(combiner, Combiner::kSum);
  EXPECT_TRUE(ParseCombiner("mean", &combiner).ok());
  EXPECT_EQ(combiner, Combiner::kMean);
  EXPECT_TRUE(ParseCombiner("sqrtn", &combiner).ok());
  EXPECT_EQ(combiner, Combiner::kSqrtn);
  EXPECT_EQ(ParseCombiner("max", &combiner).message(),
            "`combiner` must be one of sum, mean, sqrtn. Received: max");
}

}  // namespace
}  // namespace layoutmap
