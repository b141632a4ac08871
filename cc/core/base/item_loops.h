// Runs several loops over items of different sizes as one parallel loop.

#ifndef TF_LAYOUTMAP_CORE_BASE_ITEM_LOOPS_H_
#define TF_LAYOUTMAP_CORE_BASE_ITEM_LOOPS_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"

namespace layoutmap {

// A loop over items of different sizes. Item i costs (splits[i + 1] - splits[i]
// + per_item) units. Each unit takes about `unit_cost` nanoseconds. If `splits`
// is empty, there are `num_even_items` items of size 0.
struct ItemLoop {
  Span<const int64_t> splits;
  int64_t per_item = 1;
  int64_t unit_cost = 1;
  int64_t num_even_items = 0;

  int64_t num_items() const {
    return splits.empty() ? num_even_items : splits.size() - 1;
  }
};

// Calls `work(loop, begin, end)` with item ranges that cover each item of each
// loop once. All ranges have about the same cost, even if the item sizes are
// skewed. All loops run as a single parallel loop, so the threads are woken
// only once and also share the items of small loops.
void RunItemLoops(
    const std::vector<ItemLoop>& loops, const ParallelFor& parallel_for,
    const std::function<void(size_t loop, int64_t begin, int64_t end)>& work);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_BASE_ITEM_LOOPS_H_
