// Writes rows of a sharded table, one per id.

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

// Returns the group, in [0, num_groups), that a row belongs to. Each group is
// written by one worker. The group is a hash of the row (Knuth's multiplicative
// hash) instead of its shard, because in a vocabulary sorted by frequency most
// ids belong to the first shard.
inline uint64_t GroupOfRow(uint64_t row, uint64_t num_groups) {
  const uint32_t hash = static_cast<uint32_t>(row) * uint32_t{2654435761};
  return hash * num_groups >> 32;
}

// Returns the last index of each row in `ids`, in descending order. Seen rows
// are marked in a bitmap: 125 KiB for a million rows fit in the second-level
// cache.
template <typename Tid>
std::vector<int32_t> LastOfEachRow(Span<const Tid> ids, int64_t num_rows) {
  std::vector<uint64_t> seen(num_rows / 64 + 1);
  std::vector<int32_t> places(ids.size());
  int64_t num_places = 0;
  for (int64_t i = ids.size() - 1; i >= 0; --i) {
    const uint64_t row = ids[i];
    uint64_t* word = &seen[row / 64];
    // The index is always stored, and overwritten by the next one if the row
    // was seen. A branch would be hard to predict for skewed ids.
    places[num_places] = static_cast<int32_t>(i);
    num_places += ~(*word >> (row % 64)) & 1;
    *word |= uint64_t{1} << (row % 64);
  }
  places.resize(num_places);
  return places;
}

// Calls push(i) for each index i in `ids` whose row belongs to one of the
// groups [first, last) of `num_groups`, in id order.
template <typename Tid, typename Push>
void PushOwnIds(Span<const Tid> ids, int64_t num_groups, int64_t first,
                int64_t last, const Push& push) {
  const uint64_t size = last - first;
  constexpr int64_t kBlock = 1024;
  int32_t selected[kBlock];
  for (int64_t begin = 0; begin < ids.size(); begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, ids.size());
    int64_t num_selected = 0;
    // The loop has no branches, for the same reason as above.
    for (int64_t i = begin; i < end; ++i) {
      selected[num_selected] = static_cast<int32_t>(i);
      num_selected += GroupOfRow(ids[i], num_groups) - first < size;
    }
    for (int64_t k = 0; k < num_selected; ++k) push(selected[k]);
  }
}

// Calls write(row, values of the id) for each id. Ids of the same row are
// processed in id order. `values` is [num_ids, table.dim], or a single row if
// `broadcast` is true. `ids` must have been validated and must have fewer than
// 2^31 elements. `last_wins` means that a write does not depend on the previous
// values of the row.
//
// Each row belongs to one group, and each group is written by one worker, which
// searches all ids for the rows of its groups. This requires no locks, loses no
// updates, and each row receives its ids in order for any number of workers.
// The search takes about a nanosecond per id. Sorting the ids first takes
// longer, and all workers would have to wait for the sort. If `last_wins` is
// true, only the last id of each row is written. No two workers then write the
// same row, and the values are read in order.
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
  // are not read in order are prefetched like the rows.
  auto write_rows = [&](bool prefetches_values, const auto& push_all) {
    table.WithRow([&](auto row_of) {
      RowQueue<T, const T, Write> queue(write);
      push_all([&](int64_t i) {
        T* row = row_of(ids[i]);
        const T* value = values + i * stride;
        PrefetchRow(row, row_bytes);
        if (prefetches_values) PrefetchRow(value, row_bytes);
        queue.Push(row, value);
      });
    });
  };

  // Each group needs enough ids to be worth its search. If there were many
  // groups, the workers would spend most of their time on the searches. Two
  // groups per worker balance the load.
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
  // A bit per row is too expensive for a few ids of a huge table.
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
