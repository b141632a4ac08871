// The distinct rows of a batch, found in parts by several workers.

#ifndef TF_LAYOUTMAP_CORE_IDS_ROW_GROUPS_H_
#define TF_LAYOUTMAP_CORE_IDS_ROW_GROUPS_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/views.h"
#include "cc/core/memory/raw_array.h"

namespace layoutmap {

// As `UniqueRows` (cc/core/rows/unique_rows.h), with room between the parts,
// because a worker does not know how many rows those before its own have:
//
//   positions   7 2 4 .   5 0 1 6     . : nothing
//   rows        3 8 . .   20 . . .
//   starts      0 1 . .   0 . . .
//   parts       0, 2, 3   4, 1, 4
struct RowGroups {
  struct Part {
    int64_t first;          // of its rows, starts and positions
    int64_t num_rows;       // ascending, and above those of the part before
    int64_t num_positions;  // of all its rows
  };

  RowGroups() = default;
  // For at most so many positions, some of which may have no row.
  explicit RowGroups(int64_t max_positions)
      : rows(max_positions + 1),
        starts(max_positions + 1),
        positions(2 * max_positions) {}

  int64_t num_rows() const;
  int64_t num_positions() const;

  // Gives the positions that have no row, which are negative in `row_of`, a
  // row above all others.
  void Add(Span<const int64_t> row_of, uint32_t row);
  // Numbers positions anew, without those that have no row.
  void Renumber(Span<const int64_t> row_of);

  std::vector<Part> parts;
  RawArray<uint32_t> rows;
  RawArray<uint32_t> starts;     // of the positions of each row, from `first`
  RawArray<uint32_t> positions;  // of one row ascending
  // Of each position what it is to be; empty if they stay as they are.
  std::vector<uint32_t> number_of;
  // How many batches of features the positions go through.
  int64_t num_batches = 0;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_IDS_ROW_GROUPS_H_
