#include "cc/core/interactions/dot_interaction.h"

#include <cstdint>
#include <random>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/parallel_for_test.h"
#include "cc/core/simd/all_kernels_test.h"
#include "cc/core/simd/dot_kernels.h"
#include "cc/core/simd/row_kernels.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

// A batch of features whose memory has exactly the required size, so that
// sanitizers detect reads and writes outside of it.
class Batch {
 public:
  // If `integers` is true, all sums of products are exact.
  Batch(const DotLayout& layout, int64_t num_samples, bool integers)
      : layout_(layout),
        num_samples_(num_samples),
        products_(static_cast<size_t>(num_samples * layout.num_outputs())) {
    std::mt19937 random(7);
    const auto draw = [&] {
      const auto value = static_cast<float>(random() % 17) - 8.0f;
      return integers ? value : value + static_cast<float>(random()) * 1e-10f;
    };
    for (int64_t i = 0; i < layout.num_features; ++i) {
      features_.emplace_back(static_cast<size_t>(num_samples * layout.dim));
      for (float& value : features_.back()) value = draw();
      results_.emplace_back(features_.back().size(), -1.0f);
    }
    gradients_.resize(products_.size());
    for (float& value : gradients_) value = draw();
    for (size_t i = 0; i < features_.size(); ++i) {
      inputs_.push_back(features_[i].data());
      outputs_.push_back(results_[i].data());
    }
  }

  void Run(const DotKernels& kernels, const ParallelFor& parallel_for) {
    DotInteraction(layout_, inputs_, num_samples_, kernels, parallel_for,
                   products_.data());
    DotInteractionGrad(layout_, inputs_, gradients_.data(), num_samples_,
                       kernels, parallel_for, outputs_);
  }

  const std::vector<float>& products() const { return products_; }
  const std::vector<std::vector<float>>& results() const { return results_; }

  // Returns the expected products, computed one after the other.
  std::vector<float> ExpectedProducts() const {
    std::vector<float> expected;
    for (int64_t s = 0; s < num_samples_; ++s) {
      for (int64_t i = 0; i < layout_.num_features; ++i) {
        for (int64_t j = 0; j < layout_.num_features; ++j) {
          const bool is_below = j < i + layout_.self_interaction;
          if (!is_below && !layout_.full_matrix) continue;
          float sum = 0.0f;
          for (int64_t c = 0; is_below && c < layout_.dim; ++c) {
            sum += At(i, s)[c] * At(j, s)[c];
          }
          expected.push_back(sum);
        }
      }
    }
    return expected;
  }

  // Returns the expected gradients: each product adds to two rows.
  std::vector<std::vector<float>> ExpectedResults() const {
    std::vector<std::vector<float>> expected;
    for (const auto& one : features_) expected.emplace_back(one.size(), 0.0f);
    for (int64_t s = 0; s < num_samples_; ++s) {
      const float* next = gradients_.data() + s * layout_.num_outputs();
      for (int64_t i = 0; i < layout_.num_features; ++i) {
        for (int64_t j = 0; j < layout_.num_features; ++j) {
          const bool is_below = j < i + layout_.self_interaction;
          if (!is_below && !layout_.full_matrix) continue;
          const float gradient = *next++;
          for (int64_t c = 0; is_below && c < layout_.dim; ++c) {
            expected[i][s * layout_.dim + c] += gradient * At(j, s)[c];
            expected[j][s * layout_.dim + c] += gradient * At(i, s)[c];
          }
        }
      }
    }
    return expected;
  }

 private:
  const float* At(int64_t feature, int64_t sample) const {
    return features_[feature].data() + sample * layout_.dim;
  }

  DotLayout layout_;
  int64_t num_samples_;
  std::vector<std::vector<float>> features_, results_;
  std::vector<float> products_, gradients_;
  std::vector<const float*> inputs_;
  std::vector<float*> outputs_;
};

std::vector<DotLayout> Layouts() {
  std::vector<DotLayout> layouts;
  for (int64_t num_features : {1, 2, 5, 17, 33}) {
    for (int64_t dim : {0, 1, 3, 8, 16, 31}) {
      for (int kind = 0; kind < 4; ++kind) {
        layouts.push_back({num_features, dim, kind % 2 == 1, kind >= 2});
      }
    }
  }
  return layouts;
}

TEST(DotInteractionTest, EqualsALoopOverPairsForAllLevels) {
  for (const DotLayout& layout : Layouts()) {
    Batch batch(layout, 19, true);
    for (const NamedKernels& kernels : AllKernels()) {
      batch.Run(kernels.dots, SerialFor);
      ASSERT_EQ(batch.products(), batch.ExpectedProducts())
          << layout.num_features << " x " << layout.dim;
      ASSERT_EQ(batch.results(), batch.ExpectedResults())
          << layout.num_features << " x " << layout.dim;
    }
  }
}

TEST(DotInteractionTest, ResultsAreBitwiseIdenticalForLevelsAndThreads) {
  for (const DotLayout& layout :
       {DotLayout{27, 15, true, false}, DotLayout{17, 33, false, true}}) {
    Batch expected(layout, 70, false);
    expected.Run(DotKernelsFor(CpuLevel::kBaseline), SerialFor);
    for (const NamedKernels& kernels : AllKernels()) {
      for (int num_workers : {1, 3}) {
        Batch batch(layout, 70, false);
        batch.Run(kernels.dots, UnevenFor(num_workers));
        ASSERT_EQ(batch.products(), expected.products());
        ASSERT_EQ(batch.results(), expected.results());
      }
    }
  }
}

TEST(DotInteractionTest, AnEmptyBatchCallsNoKernel) {
  Batch batch({3, 4, false, false}, 0, true);
  batch.Run(DotKernelsFor(CpuLevel::kBaseline), UnevenFor(2));
  EXPECT_TRUE(batch.products().empty());
}

TEST(DotInteractionTest, ALargeSampleIsABlockOfItsOwn) {
  Batch batch({40, 700, true, false}, 3, true);
  for (const NamedKernels& kernels : AllKernels()) {
    batch.Run(kernels.dots, UnevenFor(2));
    ASSERT_EQ(batch.products(), batch.ExpectedProducts());
    ASSERT_EQ(batch.results(), batch.ExpectedResults());
  }
}

}  // namespace
}  // namespace layoutmap
