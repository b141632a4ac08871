#include "cc/core/base/item_loops.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "cc/core/base/parallel_for.h"

namespace layoutmap {
namespace {

int64_t UnitsBefore(const ItemLoop& loop, int64_t item) {
  const int64_t size =
      loop.splits.empty() ? 0 : loop.splits[item] - loop.splits[0];
  return size + item * loop.per_item;
}

// Returns the first item that starts at or after `cost`.
int64_t ItemAt(const ItemLoop& loop, int64_t cost) {
  int64_t low = 0, high = loop.num_items();
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (UnitsBefore(loop, middle) * loop.unit_cost < cost) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace

void RunItemLoops(
    const std::vector<ItemLoop>& loops, const ParallelFor& parallel_for,
    const std::function<void(size_t loop, int64_t begin, int64_t end)>& work) {
  // Total cost of the loops before each loop.
  std::vector<int64_t> starts = {0};
  for (const ItemLoop& loop : loops) {
    starts.push_back(starts.back() +
                     UnitsBefore(loop, loop.num_items()) * loop.unit_cost);
  }
  parallel_for(starts.back(), 1, [&](int64_t begin, int64_t end) {
    size_t l =
        std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin();
    for (--l; l < loops.size() && starts[l] < end; ++l) {
      const int64_t first = ItemAt(loops[l], begin - starts[l]);
      // An item belongs to the range that contains the start of the item. The
      // last range of a loop also includes the items of cost 0 at the end of
      // the loop.
      const int64_t last = end >= starts[l + 1]
                               ? loops[l].num_items()
                               : ItemAt(loops[l], end - starts[l]);
      if (first < last) work(l, first, last);
    }
  });
}

}  // namespace layoutmap
