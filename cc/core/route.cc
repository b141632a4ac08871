#include "cc/core/route.h"

#include <string>

#include "cc/core/unique_rows.h"

namespace layoutmap {
namespace {

// A stable counting sort by shard.
template <typename Tid>
void GroupByShard(const RowPartition& partition, Span<const Tid> rows,
                  Route<Tid>* route) {
  const int64_t n = rows.size();
  std::vector<int32_t> shards(n);
  std::vector<Tid> local_rows(n);
  route->splits.assign(partition.num_shards() + 1, 0);
  for (int64_t i = 0; i < n; ++i) {
    const RowOwner owner = partition.Locate(rows[i]);
    shards[i] = owner.shard;
    local_rows[i] = static_cast<Tid>(owner.local_row);
    ++route->splits[owner.shard + 1];
  }
  for (int32_t s = 0; s < partition.num_shards(); ++s) {
    route->splits[s + 1] += route->splits[s];
  }
  std::vector<int64_t> next(route->splits.begin(), route->splits.end() - 1);
  route->local_rows.resize(n);
  route->permutation.resize(n);
  route->inverse.resize(n);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t slot = next[shards[i]]++;
    route->local_rows[slot] = local_rows[i];
    route->permutation[slot] = static_cast<int32_t>(i);
    route->inverse[i] = static_cast<int32_t>(slot);
  }
}

// `route` holds one slot per unique row, over the numbers of unique rows;
// afterwards over the ids.
template <typename Tid>
void SpreadOverIds(const UniqueRows& unique, Route<Tid>* route) {
  std::vector<int32_t> inverse(unique.positions.size());
  for (int64_t u = 0; u < unique.size(); ++u) {
    const int32_t slot = route->inverse[u];
    route->permutation[slot] =
        static_cast<int32_t>(unique.positions[unique.splits[u]]);
    for (int64_t k = unique.splits[u]; k < unique.splits[u + 1]; ++k) {
      inverse[unique.positions[k]] = slot;
    }
  }
  route->inverse = std::move(inverse);
}

}  // namespace

template <typename Tid>
Status RouteIds(const RowPartition& partition, Span<const Tid> ids, bool unique,
                Route<Tid>* route) {
  if (ids.size() > INT32_MAX) {
    return InvalidArgument("One call routes at most 2^31 - 1 ids. Received: " +
                           std::to_string(ids.size()));
  }
  const uint64_t num_rows = static_cast<uint64_t>(partition.num_rows());
  for (int64_t i = 0; i < ids.size(); ++i) {
    if (static_cast<uint64_t>(static_cast<int64_t>(ids[i])) >= num_rows) {
      return InvalidArgument(
          "ids[" + std::to_string(i) + "] = " + std::to_string(ids[i]) +
          " is outside the table with " + std::to_string(num_rows) + " rows");
    }
  }
  if (!unique) {
    GroupByShard(partition, ids, route);
    return Status();
  }
  const std::vector<uint32_t> rows(ids.begin(), ids.end());
  const Span<const uint32_t> segment(rows);
  const UniqueRows distinct =
      FindUniqueRows(Span<const Span<const uint32_t>>(&segment, 1), num_rows);
  const std::vector<Tid> distinct_ids(distinct.rows.begin(),
                                      distinct.rows.end());
  GroupByShard(partition, Span<const Tid>(distinct_ids), route);
  SpreadOverIds(distinct, route);
  return Status();
}

template Status RouteIds<int32_t>(const RowPartition&, Span<const int32_t>,
                                  bool, Route<int32_t>*);
template Status RouteIds<int64_t>(const RowPartition&, Span<const int64_t>,
                                  bool, Route<int64_t>*);

}  // namespace layoutmap
