// Parallel loops for tests, which split the work into uneven ranges, so that a
// test detects results that depend on the split.

#ifndef TF_LAYOUTMAP_CORE_BASE_PARALLEL_FOR_TEST_H_
#define TF_LAYOUTMAP_CORE_BASE_PARALLEL_FOR_TEST_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "cc/core/base/parallel_for.h"

namespace layoutmap {

// Returns the boundaries of ranges that cover [0, total), in ascending order.
// The first range and the last range have one unit. The ranges between them
// have random sizes.
inline std::vector<int64_t> RandomBorders(int64_t total, int64_t num_ranges,
                                          uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int64_t> borders = {0, total};
  if (total > 1) borders.push_back(1);
  if (total > 2) borders.push_back(total - 1);
  for (int64_t i = 0; total > 0 && i < num_ranges; ++i) {
    borders.push_back(random() % total);
  }
  std::sort(borders.begin(), borders.end());
  borders.erase(std::unique(borders.begin(), borders.end()), borders.end());
  return borders;
}

// Returns a parallel loop in which `num_workers` threads process uneven ranges.
// The last range is processed first.
inline ParallelFor UnevenFor(int num_workers, uint32_t seed = 0) {
  return [num_workers, seed](
             int64_t total, int64_t /*cost*/,
             const std::function<void(int64_t begin, int64_t end)>& work) {
    if (total <= 0) return;
    const std::vector<int64_t> borders =
        RandomBorders(total, 3 * num_workers, seed + num_workers);
    std::atomic<int64_t> left{static_cast<int64_t>(borders.size()) - 1};
    auto take_ranges = [&] {
      for (int64_t i = --left; i >= 0; i = --left) {
        work(borders[i], borders[i + 1]);
      }
    };
    std::vector<std::thread> threads;
    for (int t = 1; t < num_workers; ++t) threads.emplace_back(take_ranges);
    take_ranges();
    for (std::thread& thread : threads) thread.join();
  };
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_BASE_PARALLEL_FOR_TEST_H_
