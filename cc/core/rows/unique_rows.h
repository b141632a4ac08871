// Finds the unique rows of a batch and the positions of each row.

#ifndef TF_LAYOUTMAP_CORE_ROWS_UNIQUE_ROWS_H_
#define TF_LAYOUTMAP_CORE_ROWS_UNIQUE_ROWS_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"

namespace layoutmap {

struct UniqueRows {
  // The unique rows in ascending order.
  std::vector<uint32_t> rows;
  // Index of the first position of each row, and the number of positions,
  // [num_unique + 1].
  std::vector<int64_t> splits{0};
  // The positions of rows[u] are positions[splits[u]] to positions[splits[u +
  // 1] - 1], in ascending order.
  std::vector<uint32_t> positions;

  int64_t size() const { return static_cast<int64_t>(rows.size()); }
};

// Finds the unique rows of the concatenated `segments`. A position is an index
// in the concatenation. All rows must be below `num_rows`. The time of the
// radix sort is proportional to the number of ids and to the number of digits
// of `num_rows`. `labels` is empty or has one label per id. If it is not empty,
// the result contains labels[p] instead of position p.
UniqueRows FindUniqueRows(Span<const Span<const uint32_t>> segments,
                          int64_t num_rows,
                          const ParallelFor& parallel_for = SerialFor,
                          Span<const uint32_t> labels = {});

// Minimum number of ids for which all threads share the sort. For fewer ids,
// waking the threads takes longer than sorting.
constexpr int64_t kManyIds = int64_t{1} << 16;

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_ROWS_UNIQUE_ROWS_H_
