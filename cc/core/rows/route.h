// Scatter decomposition: which ids go to which shard.

#ifndef TF_LAYOUTMAP_CORE_ROWS_ROUTE_H_
#define TF_LAYOUTMAP_CORE_ROWS_ROUTE_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/rows/row_partition.h"

namespace layoutmap {

// Slot k of the routed ids, those of shard s at [splits[s], splits[s + 1]):
//
//   ids:         7 0 4 0      shards of 4 rows: [0, 4) and [4, 8)
//   local_rows:  0 0 | 3 0    shard 0 gets 0 0, shard 1 gets 7 4
//   splits:      0 2 4
//   permutation: 1 3 | 0 2    slot -> where in ids (first place, if unique)
//   inverse:     2 0 3 1      id -> slot
template <typename Tid>
struct Route {
  std::vector<Tid> local_rows;
  std::vector<int64_t> splits;
  std::vector<int32_t> permutation;
  std::vector<int32_t> inverse;
};

// The same in memory of the caller's: as many slots as ids. `inverse` may be
// empty if nobody wants it.
template <typename Tid>
struct RouteView {
  Span<Tid> local_rows;
  Span<int64_t> splits;
  Span<int32_t> permutation;
  Span<int32_t> inverse;
};

// One slot per id, in the order of ids inside a shard. Refused whole if an id
// is outside the table; `out` then holds nothing of use.
template <typename Tid>
Status RouteEachId(const RowPartition& partition, Span<const Tid> ids,
                   const ParallelFor& parallel_for, RouteView<Tid> out);

// Keeps the order of ids inside a shard; with `unique`, each row once and
// ascending inside its shard. Refused whole if an id is outside the table.
template <typename Tid>
Status RouteIds(const RowPartition& partition, Span<const Tid> ids, bool unique,
                Route<Tid>* route);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_ROWS_ROUTE_H_
