// Writes one row of a sharded table for each id.

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

// Returns the group of a row, in [0, num_groups). One worker writes all rows of
// a group. The group is a hash of the row (Knuth's multiplicative hash). Using
// the shard of the row as its group would balance the load poorly, because most
// ids belong to the first shard if a vocabulary is sorted by frequency.
inline uint64_t GroupOfRow(uint64_t row, uint64_t num_groups) {
  const uint32_t hash = static_cast<uint32_t>(row) * uint32_t{2654435761};
  return hash * num_groups >> 32;
}

// Returns the index of the last occurrence of each row in `ids`. The indices
// are in descending order. A bitmap marks the rows that have already occurred.
// For a million rows, it takes 125 KB, which fits in the second-level cache.
template <typename Tid>
std::vector<int32_t> LastOfEachRow(Span<const Tid> ids, int64_t num_rows) {
  std::vector<uint64_t> seen(num_rows / 64 + 1);
  std::vector<int32_t> places(ids.size());
  int64_t num_places = 0;
  for (int64_t i = ids.size() - 1; i >= 0; --i) {
    const uint64_t row = ids[i];
    uint64_t* word = &seen[row / 64];
    // The code always stores the index. If the row has already occurred, the
    // next index overwrites it. A branch would be hard to predict for skewed
    // ids.
    places[num_places] = static_cast<int32_t>(i);
    num_places += ~(*word >> (row % 64)) & 1;
    *word |= uint64_t{1} << (row % 64);
  }
  places.resize(num_places);
  return places;
}

// Calls push(i) for each index i in `ids` whose row belongs to one of the
// groups [first, last). The calls are in the order of the indices.
template <typename Tid, typename Push>
void PushOwnIds(Span<const Tid> ids, int64_t num_groups, int64_t first,
                int64_t last, const Push& push) {
  const uint64_t size = last - first;
  constexpr int64_t kBlock = 1024;
  int32_t selected[kBlock];
  for (int64_t begin = 0; begin < ids.size(); begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, ids.size());
    int64_t num_selected = 0;
    // The loop has no branches, because a branch would be hard to predict for
    // skewed ids.
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
// 2^31 elements. `last_wins` must be true only if the result of a write does
// not depend on the previous values of the row.
//
// Each row belongs to one group, and one worker writes all rows of a group. The
// worker searches all ids for rows of its groups, which takes about a
// nanosecond per id. Therefore, the workers need no locks, no update is lost,
// and each row receives its values in id order for any number of workers.
// Sorting the ids would take longer, and all workers would have to wait for the
// sort. If `last_wins` is true, only the last id of each row is written. Then
// no two workers write the same row, and the values are read in order.
template <typename T, typename Tid, typename Write>
void ScatterRows(const ShardedView<T>& table, Span<const Tid> ids,
                 const T* values, bool broadcast, bool last_wins,
                 const Write& write, int num_workers,
                 const ParallelFor& parallel_for) {
  const int64_t n = ids.size();
  const int64_t row_bytes = table.dim * static_cast<int64_t>(sizeof(T));
  const int64_t stride = broadcast ? 0 : table.dim;
  const int64_t cost = 20 + row_bytes / 8;
  // Calls push_all(push). The function push(i) writes the row of ids[i]. If the
  // values are not read in order, push(i) prefetches both the row and its
  // values.
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

  // A group must have enough ids, because the worker searches all ids for each
  // group. With many groups, the workers would spend most of their time
  // searching. Two groups per worker are enough to balance the load.
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
  // The bitmap is used only if there are enough ids. Its size depends on the
  // number of rows, so it is too expensive for a few ids of a huge table.
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
