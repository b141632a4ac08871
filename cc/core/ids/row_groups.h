// The unique rows of a batch, in several parts. Each part was found by one
// worker.

#ifndef TF_LAYOUTMAP_CORE_IDS_ROW_GROUPS_H_
#define TF_LAYOUTMAP_CORE_IDS_ROW_GROUPS_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/views.h"
#include "cc/core/memory/raw_array.h"

namespace layoutmap {

// The same data as `UniqueRows` (cc/core/rows/unique_rows.h), with unused
// elements after each part, because a worker does not know how many rows the
// preceding parts have. In this example, a dot is an unused element:
//
//   positions   7 2 4 .   5 0 1 6
//   rows        3 8 . .   20 . . .
//   starts      0 1 . .   0 . . .
//   parts       0, 2, 3   4, 1, 4
struct RowGroups {
  struct Part {
    // Index of the first element of the part in `rows`, `starts` and
    // `positions`.
    int64_t first;
    // Number of rows. The rows of a part are ascending and are above all rows
    // of the preceding part.
    int64_t num_rows;
    // Total number of positions of these rows.
    int64_t num_positions;
  };

  RowGroups() = default;
  // Allocates memory for up to `max_positions` positions, some of which may
  // have no row.
  explicit RowGroups(int64_t max_positions)
      : rows(max_positions + 1),
        starts(max_positions + 1),
        positions(2 * max_positions) {}

  int64_t num_rows() const;
  int64_t num_positions() const;

  // Assigns `row` to the positions without a row, for which `row_of` is
  // negative. `row` must be above all other rows.
  void Add(Span<const int64_t> row_of, uint32_t row);
  // Renumbers the positions so that positions without a row are not counted.
  void Renumber(Span<const int64_t> row_of);

  std::vector<Part> parts;
  RawArray<uint32_t> rows;
  // Index of the first position of each row, relative to `first`.
  RawArray<uint32_t> starts;
  // The positions are ascending within each row.
  RawArray<uint32_t> positions;
  // New number of each position. Empty if the positions were not renumbered.
  std::vector<uint32_t> number_of;
  // Number of feature batches that contain the positions.
  int64_t num_batches = 0;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_IDS_ROW_GROUPS_H_
