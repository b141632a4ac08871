// Loops over items of different sizes, carried out as one parallel loop.

#ifndef TF_LAYOUTMAP_CORE_BASE_ITEM_LOOPS_H_
#define TF_LAYOUTMAP_CORE_BASE_ITEM_LOOPS_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"

namespace layoutmap {

// A loop whose item i takes splits[i + 1] - splits[i] units of its own plus
// `per_item`, of about `unit_cost` nanoseconds each.
struct ItemLoop {
  Span<const int64_t> splits;
  int64_t per_item = 1;
  int64_t unit_cost = 1;

  int64_t num_items() const { return splits.size() - 1; }
};

// Calls `work(loop, begin, end)` with ranges of items that cost about the same,
// whatever the skew, and cover the items of each loop once. One parallel loop
// for all of them: threads are woken once, and no small loop is too short to be
// divided.
void RunItemLoops(
    const std::vector<ItemLoop>& loops, const ParallelFor& parallel_for,
    const std::function<void(size_t loop, int64_t begin, int64_t end)>& work);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_BASE_ITEM_LOOPS_H_
