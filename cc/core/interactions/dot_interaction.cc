#include "cc/core/interactions/dot_interaction.h"

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"
#include "cc/core/simd/dot_kernels.h"

namespace layoutmap {
namespace {

// Number of floats in a cache line, and in the widest register.
constexpr int64_t kLine = 16;

// Limits of the rows that a kernel reads before it computes products: number of
// samples, and number of floats.
constexpr int64_t kMaxSamples = 16;
constexpr int64_t kBlockSize = 8192;

int64_t RoundUp(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

// Owns the memory of a workspace.
class Workspace {
 public:
  explicit Workspace(const DotLayout& layout) {
    const int64_t num_rows = RoundUp(layout.num_features, 4);
    work_.dim_stride = RoundUp(std::max<int64_t>(layout.dim, 1), kLine);
    work_.feature_stride = RoundUp(layout.num_features, kLine);
    work_.sample_stride = num_rows * work_.dim_stride;
    work_.num_samples = std::max<int64_t>(
        1, std::min(kMaxSamples, kBlockSize / work_.sample_stride));
    const int64_t rows = work_.num_samples * work_.sample_stride;
    const int64_t columns = RoundUp(layout.dim, 4) * work_.feature_stride;
    const int64_t square = num_rows * work_.feature_stride;
    memory_.resize(2 * rows + columns + square + kLine);
    float* next = memory_.data();
    while (reinterpret_cast<uintptr_t>(next) % (kLine * sizeof(float)) != 0) {
      ++next;
    }
    work_.rows = next;
    work_.results = next += rows;
    work_.columns = next += rows;
    work_.square = next += columns;
  }

  const DotWorkspace& get() const { return work_; }

 private:
  std::vector<float> memory_;
  DotWorkspace work_;
};

// Returns the approximate number of nanoseconds per sample.
int64_t Cost(const DotLayout& layout) {
  const int64_t size = layout.num_features * layout.dim;
  return 50 + size / 8 + layout.num_features * size / 64;
}

}  // namespace

void DotInteraction(const DotLayout& layout, Span<const float* const> features,
                    int64_t num_samples, const DotKernels& kernels,
                    const ParallelFor& parallel_for, float* out) {
  assert(features.size() == layout.num_features);
  parallel_for(num_samples, Cost(layout), [&](int64_t begin, int64_t end) {
    const Workspace work(layout);
    kernels.products(layout, features.data(), begin, end, work.get(), out);
  });
}

void DotInteractionGrad(const DotLayout& layout,
                        Span<const float* const> features,
                        const float* gradients, int64_t num_samples,
                        const DotKernels& kernels,
                        const ParallelFor& parallel_for,
                        Span<float* const> out) {
  assert(features.size() == layout.num_features);
  assert(out.size() == layout.num_features);
  parallel_for(num_samples, 2 * Cost(layout), [&](int64_t begin, int64_t end) {
    const Workspace work(layout);
    kernels.gradients(layout, features.data(), gradients, begin, end,
                      work.get(), out.data());
  });
}

}  // namespace layoutmap
