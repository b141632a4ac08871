// Writes to rows of a sharded table, one per id.

#ifndef TF_LAYOUTMAP_CORE_SCATTER_H_
#define TF_LAYOUTMAP_CORE_SCATTER_H_

#include <cstdint>
#include <vector>

#include "cc/core/gather.h"
#include "cc/core/lookup.h"
#include "cc/core/parallel_for.h"
#include "cc/core/views.h"

namespace layoutmap {

// Positions of ids, grouped so that all those of one row are in one group, in
// their order. Groups can then run at the same time, and a row that comes
// twice is still written in the order of ids, by one worker: no lock, no lost
// update, the same bits for any number of workers.
struct RowGroups {
  std::vector<int32_t> positions;
  std::vector<int64_t> splits;  // [num_groups + 1]
};

template <typename Tid>
RowGroups GroupRows(Span<const Tid> ids) {
  // Few ids are not worth a second worker.
  constexpr int64_t kNumGroups = 16;
  constexpr int64_t kFewIds = 512;
  const int64_t n = ids.size();
  RowGroups groups;
  groups.positions.resize(n);
  if (n < kFewIds) {
    for (int64_t i = 0; i < n; ++i) groups.positions[i] = i;
    groups.splits = {0, n};
    return groups;
  }
  // By a hash of the row, not by shard: in a vocabulary sorted by frequency
  // the first shard gets most of the ids (Knuth's multiplicative hash).
  auto group_of = [](Tid id) {
    return (static_cast<uint32_t>(id) * uint32_t{2654435761}) >> 28;
  };
  groups.splits.assign(kNumGroups + 1, 0);
  for (Tid id : ids) ++groups.splits[group_of(id) + 1];
  for (int64_t g = 0; g < kNumGroups; ++g) {
    groups.splits[g + 1] += groups.splits[g];
  }
  std::vector<int64_t> next(groups.splits.begin(), groups.splits.end() - 1);
  for (int64_t i = 0; i < n; ++i) {
    groups.positions[next[group_of(ids[i])]++] = static_cast<int32_t>(i);
  }
  return groups;
}

// update(&row[c], value[c]) for each id and column, in the order of ids where
// a row comes more than once. values is [num_ids, table.dim], or one value for
// all if `broadcast`. ids come checked, fewer than 2^31.
template <typename T, typename Tid, typename Update>
void ScatterRows(const ShardedView<T>& table, Span<const Tid> ids,
                 const T* values, bool broadcast, const Update& update,
                 const ParallelFor& parallel_for) {
  const int64_t dim = table.dim;
  const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(T));
  const RowGroups groups = GroupRows(ids);
  const int64_t num_groups = static_cast<int64_t>(groups.splits.size()) - 1;
  auto work = [&](int64_t first, int64_t last) {
    const int64_t begin = groups.splits[first];
    const int64_t end = groups.splits[last];
    T* ahead[kAhead];
    auto fetch = [&](int64_t k) {
      const int64_t i = groups.positions[k];
      ahead[k % kAhead] = table.row(ids[i]);
      PrefetchRow<true>(ahead[k % kAhead], row_bytes);
      if (!broadcast) PrefetchRow<false>(values + i * dim, row_bytes);
    };
    for (int64_t k = begin; k < std::min(begin + kAhead, end); ++k) fetch(k);
    for (int64_t k = begin; k < end; ++k) {
      T* __restrict row = ahead[k % kAhead];
      if (k + kAhead < end) fetch(k + kAhead);
      if (broadcast) {
        for (int64_t c = 0; c < dim; ++c) update(&row[c], values[0]);
      } else {
        const T* __restrict value = values + groups.positions[k] * dim;
        for (int64_t c = 0; c < dim; ++c) update(&row[c], value[c]);
      }
    }
  };
  const int64_t ids_per_group = ids.size() / num_groups + 1;
  parallel_for(num_groups, ids_per_group * (20 + row_bytes / 8), work);
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SCATTER_H_
