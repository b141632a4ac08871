// Writes to rows of a sharded table, one per id.

#ifndef TF_LAYOUTMAP_CORE_TABLES_SCATTER_H_
#define TF_LAYOUTMAP_CORE_TABLES_SCATTER_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/row_queue.h"
#include "cc/core/base/views.h"
#include "cc/core/tables/sharded_view.h"

namespace layoutmap {

// Which group of workers' work a row belongs to, in [0, num_groups). By a hash
// (Knuth's multiplicative one) and not by shard: in a vocabulary sorted by
// frequency the first shard gets most of the ids.
inline uint64_t GroupOfRow(uint64_t row, uint64_t num_groups) {
  const uint32_t hash = static_cast<uint32_t>(row) * uint32_t{2654435761};
  return hash * num_groups >> 32;
}

// Where in ids each row comes for the last time, from the end. One bit per row
// tells: 125 KiB for a million rows stay in the second-level cache.
template <typename Tid>
std::vector<int32_t> LastOfEachRow(Span<const Tid> ids, int64_t num_rows) {
  std::vector<uint64_t> seen(num_rows / 64 + 1);
  std::vector<int32_t> places(ids.size());
  int64_t num_places = 0;
  for (int64_t i = ids.size() - 1; i >= 0; --i) {
    const uint64_t row = ids[i];
    uint64_t* word = &seen[row / 64];
    // Written down in any case, and gone over by the next one: skewed ids
    // would make a branch here hard to predict.
    places[num_places] = static_cast<int32_t>(i);
    num_places += ~(*word >> (row % 64)) & 1;
    *word |= uint64_t{1} << (row % 64);
  }
  places.resize(num_places);
  return places;
}

// push(i) for each place i in ids whose row belongs to one of the groups
// [first, last) of `num_groups`, in the order of ids.
template <typename Tid, typename Push>
void PushOwnIds(Span<const Tid> ids, int64_t num_groups, int64_t first,
                int64_t last, const Push& push) {
  const uint64_t size = last - first;
  constexpr int64_t kBlock = 1024;
  int32_t mine[kBlock];
  for (int64_t begin = 0; begin < ids.size(); begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, ids.size());
    int64_t num_mine = 0;
    // No branch, as above.
    for (int64_t i = begin; i < end; ++i) {
      mine[num_mine] = static_cast<int32_t>(i);
      num_mine += GroupOfRow(ids[i], num_groups) - first < size;
    }
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
// Where the last one wins, only that one is written, and as no two workers can
// meet on a row then, each reads its values as they lie.
template <typename T, typename Tid, typename Write>
void ScatterRows(const ShardedView<T>& table, Span<const Tid> ids,
                 const T* values, bool broadcast, bool last_wins,
                 const Write& write, int num_workers,
                 const ParallelFor& parallel_for) {
  const int64_t n = ids.size();
  const int64_t row_bytes = table.dim * static_cast<int64_t>(sizeof(T));
  const int64_t stride = broadcast ? 0 : table.dim;
  const int64_t cost = 20 + row_bytes / 8;
  // Calls push_all(push), where push(i) writes the row of ids[i]. Values that
  // are not read as they lie are fetched ahead like the rows.
  auto write_rows = [&](bool fetches_values, const auto& push_all) {
    table.WithRow([&](auto row_of) {
      RowQueue<T, const T, Write> queue(write);
      push_all([&](int64_t i) {
        T* row = row_of(ids[i]);
        const T* value = values + i * stride;
        PrefetchRow(row, row_bytes);
        if (fetches_values) PrefetchRow(value, row_bytes);
        queue.Push(row, value);
      });
    });
  };

  // Few ids are not worth a group, and with many groups all would do little
  // but look. Two per worker, so that none waits long for another.
  constexpr int64_t kIdsPerGroup = 256;
  constexpr int64_t kMaxGroups = 16;
  const int64_t num_groups =
      num_workers == 1
          ? 1
          : std::clamp<int64_t>(n / kIdsPerGroup, 1,
                                std::min<int64_t>(2 * num_workers, kMaxGroups));
  if (num_groups == 1) {
    return write_rows(false, [&](const auto& push) {
      for (int64_t i = 0; i < n; ++i) push(i);
    });
  }
  // A bit per row is too much for a few ids of a huge table.
  constexpr int64_t kMaxRowsPerId = 4096;
  const int64_t num_rows = table.partition->num_rows();
  if (last_wins && num_rows / kMaxRowsPerId <= n) {
    const std::vector<int32_t> places = LastOfEachRow(ids, num_rows);
    return parallel_for(places.size(), cost, [&](int64_t begin, int64_t end) {
      write_rows(false, [&](const auto& push) {
        for (int64_t k = begin; k < end; ++k) push(places[k]);
      });
    });
  }
  parallel_for(num_groups, (n / num_groups + 1) * cost,
               [&](int64_t first, int64_t last) {
                 write_rows(!broadcast, [&](const auto& push) {
                   PushOwnIds(ids, num_groups, first, last, push);
                 });
               });
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_TABLES_SCATTER_H_
