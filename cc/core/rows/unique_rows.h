// The unique rows of a batch, and the positions of each row.

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
  // positions[splits[u]] to positions[splits[u + 1] - 1] are the positions of
  // rows[u], ascending.
  std::vector<uint32_t> positions;

  int64_t size() const { return static_cast<int64_t>(rows.size()); }
};

// Finds the unique rows of concatenated `segments`; a position is an index in
// the concatenation. All rows must be below `num_rows`. The radix sort takes
// time proportional to the number of ids and the number of digits of
// `num_rows`. If `labels` is not empty, it has one label per id, and the result
// contains labels[p] instead of position p.
UniqueRows FindUniqueRows(Span<const Span<const uint32_t>> segments,
                          int64_t num_rows,
                          const ParallelFor& parallel_for = SerialFor,
                          Span<const uint32_t> labels = {});

// Minimum number of ids for which all threads share the sort. For fewer ids,
// waking the threads takes longer than sorting.
constexpr int64_t kManyIds = int64_t{1} << 16;

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_ROWS_UNIQUE_ROWS_H_
