#include "cc/core/steps/gradient_coordinates.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"

namespace layoutmap {
namespace {

// Number of values that one call of the loop's body reads. The sums of blocks
// do not depend on the number of threads.
constexpr int64_t kBlockValues = 8192;

// A range of outputs of a feature.
struct Block {
  size_t feature;
  int64_t begin;
  int64_t end;
};

double Dot(const float* one, const float* other, int64_t size) {
  constexpr int64_t kLanes = 8;
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += static_cast<double>(one[i + lane]) * other[i + lane];
    }
  }
  for (; i < size; ++i) lanes[0] += static_cast<double>(one[i]) * other[i];
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

// Returns the sum of the squared gains of an output's ids.
double SquaredGains(const RaggedIds& ids, int64_t output) {
  const int64_t begin = ids.splits()[output], end = ids.splits()[output + 1];
  const Span<const float> gains = ids.gains();
  if (gains.empty()) return static_cast<double>(end - begin);
  return Dot(gains.data() + begin, gains.data() + begin, end - begin);
}

std::vector<Block> BlocksOf(const EngineConfig& config, const Batch& batch) {
  std::vector<Block> blocks;
  for (size_t f = 0; f < batch.size(); ++f) {
    const int64_t rows =
        std::max<int64_t>(1, kBlockValues / config.dim_of_feature(f));
    const int64_t num_outputs = batch[f].num_outputs();
    for (int64_t begin = 0; begin < num_outputs; begin += rows) {
      blocks.push_back({f, begin, std::min(begin + rows, num_outputs)});
    }
  }
  return blocks;
}

// Returns the inner product of each gradient and the last gradient.
std::vector<double> ProductsWithLast(
    const EngineConfig& config, const Batch& batch,
    const std::vector<BatchGradients>& gradients,
    const ParallelFor& parallel_for) {
  const std::vector<Block> blocks = BlocksOf(config, batch);
  const size_t num_gradients = gradients.size();
  std::vector<double> sums(blocks.size() * num_gradients);
  const int64_t cost = kBlockValues / 4 * num_gradients;
  parallel_for(blocks.size(), cost, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      const Block& block = blocks[b];
      const RaggedIds& ids = batch[block.feature];
      const int64_t dim = config.dim_of_feature(block.feature);
      const float* newest = gradients.back().features[block.feature].data();
      for (int64_t o = block.begin; o < block.end; ++o) {
        const double gain = SquaredGains(ids, o);
        for (size_t g = 0; g < num_gradients; ++g) {
          const float* one = gradients[g].features[block.feature].data();
          sums[b * num_gradients + g] +=
              gain * Dot(one + o * dim, newest + o * dim, dim);
        }
      }
    }
  });
  std::vector<double> products(num_gradients);
  for (size_t i = 0; i < sums.size(); ++i)
    products[i % num_gradients] += sums[i];
  return products;
}

}  // namespace

std::vector<float> GradientCoordinates(
    const EngineConfig& config, const Batch& batch,
    const std::vector<BatchGradients>& gradients,
    const ParallelFor& parallel_for) {
  // Rows of the Cholesky factor of the matrix of inner products.
  std::vector<std::vector<double>> factor;
  for (size_t j = 0; j < gradients.size(); ++j) {
    std::vector<double> row = ProductsWithLast(
        config, batch, {gradients.begin(), gradients.begin() + j + 1},
        parallel_for);
    for (size_t i = 0; i < j; ++i) {
      for (size_t k = 0; k < i; ++k) row[i] -= row[k] * factor[i][k];
      // Earlier gradients can be linearly dependent, zero or not finite.
      const double length = factor[i][i];
      row[i] = length > 0 && std::isfinite(length) && std::isfinite(row[i])
                   ? row[i] / length
                   : 0.0;
      row[j] -= row[i] * row[i];
    }
    // Rounding errors can make the square negative. NaN stays NaN.
    row[j] = row[j] < 0 ? 0.0 : std::sqrt(row[j]);
    factor.push_back(std::move(row));
  }
  std::vector<float> coordinates;
  constexpr double kLargest = std::numeric_limits<float>::max() / 4;
  for (const double one : factor.back()) {
    const bool is_finite = std::isfinite(one);
    coordinates.push_back(static_cast<float>(
        is_finite ? std::clamp(one, -kLargest, kLargest) : one));
  }
  return coordinates;
}

}  // namespace layoutmap
