#include "cc/core/base/all_finite.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"

namespace layoutmap {
namespace {

// Number of values that one call of the loop's body checks.
constexpr int64_t kBlock = 4096;

bool IsFinite(Span<const float> values) {
  // Without its sign bit, a finite float is less than infinity if both are read
  // as integers. The compiler vectorizes the comparison of signed integers for
  // every instruction set.
  constexpr int32_t kInfinity = 0x7f800000;
  int32_t largest = 0;
  for (int64_t i = 0; i < values.size(); ++i) {
    int32_t bits;
    std::memcpy(&bits, values.data() + i, sizeof(bits));
    largest = std::max(largest, bits & 0x7fffffff);
  }
  return largest < kInfinity;
}

}  // namespace

bool AllFinite(const std::vector<Span<const float>>& arrays,
               const ParallelFor& parallel_for) {
  std::vector<Span<const float>> blocks;
  for (const Span<const float>& array : arrays) {
    for (int64_t i = 0; i < array.size(); i += kBlock) {
      blocks.push_back({array.data() + i, std::min(kBlock, array.size() - i)});
    }
  }
  std::atomic<bool> found{false};
  const int64_t kNanoseconds = kBlock / 4;
  parallel_for(blocks.size(), kNanoseconds, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (!IsFinite(blocks[i])) {
        found.store(true, std::memory_order_relaxed);
        return;
      }
    }
  });
  return !found.load(std::memory_order_relaxed);
}

}  // namespace layoutmap
