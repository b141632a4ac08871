// Writes to rows of a sharded table, one per id.

#ifndef TF_LAYOUTMAP_CORE_SCATTER_H_
#define TF_LAYOUTMAP_CORE_SCATTER_H_

#include <cstdint>
#include <numeric>
#include <vector>

#include "cc/core/gather.h"
#include "cc/core/lookup.h"
#include "cc/core/parallel_for.h"
#include "cc/core/views.h"

namespace layoutmap {

// Positions of the ids that come for the first time, and of the others.
struct Occurrences {
  std::vector<int32_t> firsts;
  std::vector<int32_t> repeats;
};

// One bit per row: 125 KiB for a million rows stay in the second-level cache.
// `from_end` reads the ids backwards: firsts are then the last of their row.
template <typename Tid>
Occurrences FindRepeats(Span<const Tid> ids, int64_t num_rows,
                        bool from_end = false) {
  Occurrences found;
  found.firsts.resize(ids.size());
  found.repeats.resize(ids.size());
  int64_t num_firsts = 0;
  std::vector<uint64_t> seen(num_rows / 64 + 1);
  for (int64_t k = 0; k < ids.size(); ++k) {
    const int64_t i = from_end ? ids.size() - 1 - k : k;
    uint64_t* word = &seen[static_cast<uint64_t>(ids[i]) >> 6];
    const int is_first = ~(*word >> (ids[i] & 63)) & 1;
    *word |= uint64_t{1} << (ids[i] & 63);
    // Both lists get the position, one of them keeps it: skewed ids would
    // make a branch here hard to predict.
    found.firsts[num_firsts] = static_cast<int32_t>(i);
    found.repeats[k - num_firsts] = static_cast<int32_t>(i);
    num_firsts += is_first;
  }
  found.firsts.resize(num_firsts);
  found.repeats.resize(ids.size() - num_firsts);
  return found;
}

// Positions grouped so that all those of one row are in one group, in order.
struct RowGroups {
  std::vector<int32_t> positions;
  std::vector<int64_t> splits;  // [num_groups + 1]
};

template <typename Tid>
RowGroups GroupRows(Span<const Tid> ids, Span<const int32_t> positions,
                    int num_groups) {
  // By a hash of the row, not by shard: in a vocabulary sorted by frequency
  // the first shard gets most of the ids (Knuth's multiplicative hash).
  auto group_of = [&](int32_t position) {
    const uint32_t hash =
        static_cast<uint32_t>(ids[position]) * uint32_t{2654435761};
    return static_cast<uint64_t>(hash) * num_groups >> 32;
  };
  RowGroups groups;
  groups.positions.resize(positions.size());
  groups.splits.assign(num_groups + 1, 0);
  for (int32_t p : positions) ++groups.splits[group_of(p) + 1];
  for (int g = 0; g < num_groups; ++g) {
    groups.splits[g + 1] += groups.splits[g];
  }
  std::vector<int64_t> next(groups.splits.begin(), groups.splits.end() - 1);
  for (int32_t p : positions) groups.positions[next[group_of(p)]++] = p;
  return groups;
}

// write(row, values of the id) for each id, in the order of ids where a row
// comes more than once. values is [num_ids, table.dim], or stays where it is
// if `broadcast`. ids come checked, fewer than 2^31. `last_wins` says that a
// write leaves nothing of what a row was before.
template <typename T, typename Tid, typename Write>
void ScatterRows(const ShardedView<T>& table, Span<const Tid> ids,
                 const T* values, bool broadcast, bool last_wins,
                 const Write& write, int num_workers,
                 const ParallelFor& parallel_for) {
  const int64_t n = ids.size();
  const int64_t row_bytes = table.dim * static_cast<int64_t>(sizeof(T));
  const int64_t stride = broadcast ? 0 : table.dim;
  auto write_range = [&](int64_t begin, int64_t end, auto position) {
    T* ahead[kAhead];
    auto fetch = [&](int64_t k) {
      ahead[k % kAhead] = table.row(ids[position(k)]);
      PrefetchRow<true>(ahead[k % kAhead], row_bytes);
    };
    for (int64_t k = begin; k < std::min(begin + kAhead, end); ++k) fetch(k);
    for (int64_t k = begin; k < end; ++k) {
      T* row = ahead[k % kAhead];
      if (k + kAhead < end) fetch(k + kAhead);
      write(row, values + position(k) * stride);
    }
  };
  // Few ids are not worth a second worker, and one worker repeats rows as it
  // likes.
  constexpr int64_t kFewIds = 512;
  if (n < kFewIds || num_workers == 1) {
    return write_range(0, n, [](int64_t k) { return k; });
  }
  const int64_t cost = 20 + row_bytes / 8;
  auto write_groups = [&](const RowGroups& groups) {
    const int64_t size = groups.splits.back();
    parallel_for(num_workers, (size / num_workers + 1) * cost,
                 [&](int64_t first, int64_t last) {
                   write_range(groups.splits[first], groups.splits[last],
                               [&](int64_t k) { return groups.positions[k]; });
                 });
  };
  // A bit per row is too much for a few ids of a huge table.
  constexpr int64_t kMaxRowsPerId = 4096;
  const int64_t num_rows = table.partition->num_rows();
  if (num_rows / kMaxRowsPerId > n) {
    std::vector<int32_t> all(n);
    std::iota(all.begin(), all.end(), 0);
    return write_groups(GroupRows(ids, Span<const int32_t>(all), num_workers));
  }
  // Rows that come for the first time: no two workers meet on one, in whatever
  // ranges, and values are read in the order in which they lie.
  Occurrences found = FindRepeats(ids, num_rows, last_wins);
  parallel_for(found.firsts.size(), cost, [&](int64_t begin, int64_t end) {
    write_range(begin, end, [&](int64_t k) { return found.firsts[k]; });
  });
  // Then the others, those of one row by one worker: no lock, no lost update,
  // and each row sees its ids in their order, whatever the workers.
  if (found.repeats.empty() || last_wins) return;
  write_groups(GroupRows(ids, Span<const int32_t>(found.repeats), num_workers));
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SCATTER_H_
