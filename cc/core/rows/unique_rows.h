// The distinct rows of a batch, and where each of them stands.

#ifndef TF_LAYOUTMAP_CORE_ROWS_UNIQUE_ROWS_H_
#define TF_LAYOUTMAP_CORE_ROWS_UNIQUE_ROWS_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"

namespace layoutmap {

struct UniqueRows {
  std::vector<uint32_t> rows;      // ascending
  std::vector<int64_t> splits{0};  // [num_unique + 1]
  // positions[splits[u] .. splits[u + 1]) are those of rows[u], ascending.
  std::vector<uint32_t> positions;

  int64_t size() const { return static_cast<int64_t>(rows.size()); }
};

// `segments` are numbered through: a position counts from the start of the
// first. All rows are below `num_rows`. A radix sort: its time grows with the
// number of ids and the digits of num_rows, never with num_rows. If there are
// `labels`, one for each id, `positions` have labels[p] in the place of p.
UniqueRows FindUniqueRows(Span<const Span<const uint32_t>> segments,
                          int64_t num_rows,
                          const ParallelFor& parallel_for = SerialFor,
                          Span<const uint32_t> labels = {});

// So many ids are sorted by all threads; fewer take one longer to wake up.
constexpr int64_t kManyIds = int64_t{1} << 16;

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_ROWS_UNIQUE_ROWS_H_
