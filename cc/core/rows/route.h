// Routes ids to the shards of a table.

#ifndef TF_LAYOUTMAP_CORE_ROWS_ROUTE_H_
#define TF_LAYOUTMAP_CORE_ROWS_ROUTE_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/rows/row_partition.h"

namespace layoutmap {

// The result of routing ids to shards. Shard s has the slots [splits[s],
// splits[s + 1]):
//
//   ids:         7 0 4 0      shards of 4 rows: [0, 4) and [4, 8)
//   local_rows:  0 0 | 3 0    shard 0 gets 0 0, shard 1 gets 7 4
//   splits:      0 2 4
//   permutation: 1 3 | 0 2    slot -> index in ids (first one, if unique)
//   inverse:     2 0 3 1      id -> slot
template <typename Tid>
struct Route {
  std::vector<Tid> local_rows;
  std::vector<int64_t> splits;
  std::vector<int32_t> permutation;
  std::vector<int32_t> inverse;
};

// A route with one slot per id. The caller owns the memory. If the caller does
// not need `inverse`, the span may be empty.
template <typename Tid>
struct RouteView {
  Span<Tid> local_rows;
  Span<int64_t> splits;
  Span<int32_t> permutation;
  Span<int32_t> inverse;
};

// Routes ids to shards, with one slot per id. The slots of a shard are in id
// order. If an id is outside the table, returns an error, and the values of
// `out` are undefined.
template <typename Tid>
Status RouteEachId(const RowPartition& partition, Span<const Tid> ids,
                   const ParallelFor& parallel_for, RouteView<Tid> out);

// Routes ids to shards. If `unique` is false, each id has one slot, and the
// slots of a shard are in id order. If `unique` is true, each row has one slot,
// and the slots of a shard are in row order. Returns an error if an id is
// outside the table.
template <typename Tid>
Status RouteIds(const RowPartition& partition, Span<const Tid> ids, bool unique,
                Route<Tid>* route);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_ROWS_ROUTE_H_
