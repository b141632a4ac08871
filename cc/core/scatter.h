// Writes to rows of a sharded table, one per id.

#ifndef TF_LAYOUTMAP_CORE_SCATTER_H_
#define TF_LAYOUTMAP_CORE_SCATTER_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cc/core/lookup.h"
#include "cc/core/parallel_for.h"
#include "cc/core/row_queue.h"
#include "cc/core/views.h"

namespace layoutmap {

// Which group of workers' work a row belongs to, in [0, num_groups). By a hash
// (Knuth's multiplicative one) and not by shard: in a vocabulary sorted by
// frequency the first shard gets most of the ids.
inline uint64_t GroupOfRow(uint64_t row, uint64_t num_groups) {
  const uint32_t hash = static_cast<uint32_t>(row) * uint32_t{2654435761};
  return hash * num_groups >> 32;
}

// Of `places` in ids keeps those, in their order, whose row was not seen yet;
// now it was. One bit of `seen` per row. Returns how many places are left.
template <typename Tid>
int64_t KeepUnseen(Span<const Tid> ids, std::vector<uint64_t>* seen,
                   int64_t num_places, int32_t* places) {
  int64_t num_kept = 0;
  for (int64_t k = 0; k < num_places; ++k) {
    const uint64_t row = ids[places[k]];
    uint64_t* word = &(*seen)[row / 64];
    places[num_kept] = places[k];
    num_kept += ~(*word >> (row % 64)) & 1;
    *word |= uint64_t{1} << (row % 64);
  }
  return num_kept;
}

// push(i) for each place i in ids that belongs to one of the groups
// [first, last) of `num_groups`, in the order of ids. With `seen`, a bit per
// row for those whose last id came by, from the end and only the last of each
// row.
template <typename Tid, typename Push>
void PushOwnIds(Span<const Tid> ids, int64_t num_groups, int64_t first,
                int64_t last, std::vector<uint64_t>* seen, const Push& push) {
  const int64_t n = ids.size();
  const uint64_t size = last - first;
  // Rows that share a word of `seen` have one worker, and those that share a
  // cache line of it mostly.
  const int key_shift = seen != nullptr ? 10 : 0;
  constexpr int64_t kBlock = 1024;
  int32_t mine[kBlock];
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    int64_t num_mine = 0;
    // Every place is written down and the next one may go over it: random rows
    // would make a branch here hard to predict.
    for (int64_t k = begin; k < std::min(begin + kBlock, n); ++k) {
      const int64_t i = seen != nullptr ? n - 1 - k : k;
      const uint64_t key = static_cast<uint64_t>(ids[i]) >> key_shift;
      mine[num_mine] = static_cast<int32_t>(i);
      num_mine += GroupOfRow(key, num_groups) - first < size;
    }
    if (seen != nullptr) num_mine = KeepUnseen(ids, seen, num_mine, mine);
    for (int64_t k = 0; k < num_mine; ++k) push(mine[k]);
  }
}

// write(row, values of the id) for each id, in the order of ids where a row
// comes more than once. values is [num_ids, table.dim], or stays where it is
// if `broadcast`. ids come checked, fewer than 2^31. `last_wins` says that a
// write leaves nothing of what a row was before.
//
// Each row belongs to one group, and each group is written by one worker, who
// looks through all ids for its own: no lock, no lost update, and each row sees
// its ids in their order, whatever the workers. Looking through takes about a
// nanosecond per id; to sort the ids first takes longer, and all would wait.
template <typename T, typename Tid, typename Write>
void ScatterRows(const ShardedView<T>& table, Span<const Tid> ids,
                 const T* values, bool broadcast, bool last_wins,
                 const Write& write, int num_workers,
                 const ParallelFor& parallel_for) {
  const int64_t n = ids.size();
  const int64_t row_bytes = table.dim * static_cast<int64_t>(sizeof(T));
  const int64_t stride = broadcast ? 0 : table.dim;
  // Two groups per worker, so that none waits long for another. Few ids are
  // not worth a group, and with many groups all would do little but look.
  constexpr int64_t kIdsPerGroup = 256;
  constexpr int64_t kMaxGroups = 16;
  const int64_t num_groups =
      num_workers == 1
          ? 1
          : std::clamp<int64_t>(n / kIdsPerGroup, 1,
                                std::min<int64_t>(2 * num_workers, kMaxGroups));

  // 125 KiB for a million rows stay in the second-level cache, but are too much
  // for a few ids of a huge table.
  constexpr int64_t kMaxRowsPerId = 4096;
  const int64_t num_rows = table.partition->num_rows();
  const bool skips =
      last_wins && n >= kIdsPerGroup && num_rows / kMaxRowsPerId <= n;
  std::vector<uint64_t> seen(skips ? num_rows / 64 + 1 : 0);

  auto work = [&](int64_t first, int64_t last) {
    table.WithRow([&](auto row_of) {
      RowQueue<T, const T, Write> queue(write);
      auto push = [&](int64_t i) {
        T* row = row_of(ids[i]);
        const T* value = values + i * stride;
        PrefetchRow(row, row_bytes);
        if (stride > 0) PrefetchRow(value, row_bytes);
        queue.Push(row, value);
      };
      if (skips || num_groups > 1) {
        PushOwnIds(ids, num_groups, first, last, skips ? &seen : nullptr, push);
      } else {
        for (int64_t i = 0; i < n; ++i) push(i);
      }
    });
  };
  parallel_for(num_groups, (n / num_groups + 1) * (20 + row_bytes / 8), work);
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SCATTER_H_
