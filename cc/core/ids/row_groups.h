// The unique rows of a batch, found in parts by several workers.

#ifndef TF_LAYOUTMAP_CORE_IDS_ROW_GROUPS_H_
#define TF_LAYOUTMAP_CORE_IDS_ROW_GROUPS_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/views.h"
#include "cc/core/memory/raw_array.h"

namespace layoutmap {

// Like `UniqueRows` (cc/core/rows/unique_rows.h), with gaps between the parts,
// because a worker does not know how many rows the preceding parts have:
//
//   positions   7 2 4 .   5 0 1 6     . : unused
//   rows        3 8 . .   20 . . .
//   starts      0 1 . .   0 . . .
//   parts       0, 2, 3   4, 1, 4
struct RowGroups {
  struct Part {
    int64_t first;     // index of its first row, start and position
    int64_t num_rows;  // ascending, and above the rows of the preceding part
    int64_t num_positions;  // total over its rows
  };

  RowGroups() = default;
  // Allocates memory for up to `max_positions` positions. Some of them may have
  // no row.
  explicit RowGroups(int64_t max_positions)
      : rows(max_positions + 1),
        starts(max_positions + 1),
        positions(2 * max_positions) {}

  int64_t num_rows() const;
  int64_t num_positions() const;

  // Assigns `row`, which must be above all other rows, to the positions without
  // a row, which are negative in `row_of`.
  void Add(Span<const int64_t> row_of, uint32_t row);
  // Renumbers the positions, skipping positions without a row.
  void Renumber(Span<const int64_t> row_of);

  std::vector<Part> parts;
  RawArray<uint32_t> rows;
  RawArray<uint32_t> starts;  // first position of each row, relative to `first`
  RawArray<uint32_t> positions;  // ascending within each row
  // New number of each position; empty if the numbers do not change.
  std::vector<uint32_t> number_of;
  // Number of feature batches that the positions cover.
  int64_t num_batches = 0;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_IDS_ROW_GROUPS_H_
