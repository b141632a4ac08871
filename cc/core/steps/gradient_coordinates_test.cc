#include "cc/core/steps/gradient_coordinates.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "cc/core/base/parallel_for_test.h"
#include "cc/core/engine/engine_test.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/steps/step.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

using GradientValues = std::vector<std::vector<float>>;

constexpr int64_t kNumSamples = 9;

class GradientCoordinatesTest : public ::testing::Test {
 protected:
  GradientCoordinatesTest()
      : trainer_(TestConfig(1)),
        batch_(trainer_.MakeBatch(
            RandomBatch(trainer_.config(), kNumSamples, 3))) {}

  GradientValues Random(uint32_t seed) const {
    GradientValues values;
    for (size_t f = 0; f < batch_->size(); ++f) {
      values.push_back(RandomFloats(
          (*batch_)[f].num_outputs() * trainer_.config().dim_of_feature(f),
          seed + f));
    }
    return values;
  }

  // Returns one row per id, for all features.
  std::vector<double> RowsOf(const GradientValues& values) const {
    std::vector<double> rows;
    for (size_t f = 0; f < batch_->size(); ++f) {
      const RaggedIds& ids = (*batch_)[f];
      const int64_t dim = trainer_.config().dim_of_feature(f);
      for (int64_t o = 0; o < ids.num_outputs(); ++o) {
        for (int64_t i = ids.splits()[o]; i < ids.splits()[o + 1]; ++i) {
          const double gain = ids.gains().empty() ? 1 : ids.gains()[i];
          for (int64_t c = 0; c < dim; ++c) {
            rows.push_back(gain * values[f][o * dim + c]);
          }
        }
      }
    }
    return rows;
  }

  std::vector<float> Coordinates(const std::vector<GradientValues>& all,
                                 const ParallelFor& parallel_for) const {
    std::vector<BatchGradients> gradients;
    for (const GradientValues& values : all) {
      gradients.push_back(Trainer::MakeGradients(values));
    }
    return GradientCoordinates(trainer_.config(), *batch_, gradients,
                               parallel_for);
  }

  Trainer trainer_;
  std::shared_ptr<const Batch> batch_;
};

double Product(const std::vector<double>& one, const std::vector<double>& two) {
  double sum = 0;
  for (size_t i = 0; i < one.size(); ++i) sum += one[i] * two[i];
  return sum;
}

TEST_F(GradientCoordinatesTest, ProductsEqualProductsOfTheRows) {
  const std::vector<GradientValues> all = {Random(10), Random(20), Random(30)};
  for (int num_workers : {1, 3}) {
    std::vector<std::vector<double>> found;
    for (size_t j = 0; j < all.size(); ++j) {
      const std::vector<float> one = Coordinates(
          {all.begin(), all.begin() + j + 1}, UnevenFor(num_workers));
      ASSERT_EQ(one.size(), j + 1);
      found.emplace_back(one.begin(), one.end());
      found.back().resize(all.size());
    }
    for (size_t i = 0; i < all.size(); ++i) {
      for (size_t j = 0; j < all.size(); ++j) {
        const double expected = Product(RowsOf(all[i]), RowsOf(all[j]));
        EXPECT_NEAR(Product(found[i], found[j]), expected, 1e-4);
      }
    }
  }
}

TEST_F(GradientCoordinatesTest, DependentAndZeroGradientsAreFinite) {
  GradientValues zeros = Random(1), doubled = Random(2);
  for (std::vector<float>& feature : zeros) {
    for (float& value : feature) value = 0;
  }
  for (std::vector<float>& feature : doubled) {
    for (float& value : feature) value *= 2;
  }
  EXPECT_EQ(Coordinates({zeros}, SerialFor), std::vector<float>{0});
  const std::vector<float> found =
      Coordinates({zeros, Random(2), doubled}, SerialFor);
  EXPECT_EQ(found[0], 0);
  EXPECT_NEAR(found[1], 2 * Coordinates({Random(2)}, SerialFor)[0], 1e-4);
  EXPECT_NEAR(found[2], 0, 1e-3);
}

TEST_F(GradientCoordinatesTest, ValuesThatAreNotFiniteAreFound) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                          -std::numeric_limits<float>::infinity()}) {
    for (size_t f = 0; f < batch_->size(); ++f) {
      for (size_t i = 0; i < Random(1)[f].size(); ++i) {
        GradientValues values = Random(1);
        values[f][i] = bad;
        EXPECT_FALSE(std::isfinite(Coordinates({values}, SerialFor).back()));
      }
    }
  }
  GradientValues large = Random(1);
  for (float& value : large[0]) value = 3e38f;
  EXPECT_TRUE(std::isfinite(Coordinates({large}, SerialFor).back()));
}

}  // namespace
}  // namespace layoutmap
