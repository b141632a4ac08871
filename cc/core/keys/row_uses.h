// Sorts the uses of rows in a step by row.

#ifndef TF_LAYOUTMAP_CORE_KEYS_ROW_USES_H_
#define TF_LAYOUTMAP_CORE_KEYS_ROW_USES_H_

#include <algorithm>
#include <cstdint>
#include <utility>

#include "cc/core/base/views.h"

namespace layoutmap {

// A use of a row by a key of the batch. The upper 32 bits are the row, relative
// to the first row of its segment. The lower 32 bits are the position of the
// key in the batch. Sorting therefore groups the uses by row and orders the
// uses of a row by position.
using RowUse = uint64_t;

inline RowUse MakeRowUse(int64_t row, uint32_t position) {
  return static_cast<uint64_t>(row) << 32 | position;
}
inline int64_t RowOfUse(RowUse use) { return static_cast<int64_t>(use >> 32); }
inline uint32_t PositionOfUse(RowUse use) { return static_cast<uint32_t>(use); }

// Sorts uses. The positions must be ascending, and all rows must be below
// `num_rows`. `spare` must have at least the size of `uses`. The function may
// swap the two spans. The result is in `uses`.
inline void SortUses(int64_t num_rows, int64_t size, Span<RowUse>* uses,
                     Span<RowUse>* spare) {
  // With this digit size, the counters and the uses of a segment fit in the
  // first-level cache.
  constexpr int kMaxDigitBits = 8;
  // For sizes up to this limit, std::sort is faster than a pass over the
  // counters.
  constexpr int64_t kMaxStdSortSize = 64;
  if (size <= kMaxStdSortSize) {
    std::sort(uses->data(), uses->data() + size);
    return;
  }
  int bits = 1;
  while ((num_rows - 1) >> bits > 0) ++bits;
  const int num_passes = (bits + kMaxDigitBits - 1) / kMaxDigitBits;
  const int digit_bits = (bits + num_passes - 1) / num_passes;
  const uint64_t mask = (uint64_t{1} << digit_bits) - 1;
  for (int pass = 0; pass < num_passes; ++pass) {
    const int shift = 32 + pass * digit_bits;
    const RowUse* from = uses->data();
    RowUse* to = spare->data();
    uint32_t next[1 << kMaxDigitBits] = {};
    for (int64_t i = 0; i < size; ++i) ++next[from[i] >> shift & mask];
    uint32_t start = 0;
    for (uint64_t digit = 0; digit <= mask; ++digit) {
      start += std::exchange(next[digit], start);
    }
    for (int64_t i = 0; i < size; ++i) {
      to[next[from[i] >> shift & mask]++] = from[i];
    }
    std::swap(*uses, *spare);
  }
}

// Sorts `size` uses. The first `num_sorted` uses must already be sorted. A row
// must not occur both in the sorted part and in the other part.
inline void SortAddedUses(int64_t num_rows, int64_t num_sorted, int64_t size,
                          Span<RowUse>* uses, Span<RowUse>* spare) {
  if (num_sorted == size) return;
  RowUse* const middle = uses->data() + num_sorted;
  Span<RowUse> added = {middle, size - num_sorted};
  Span<RowUse> spare_added = {spare->data() + num_sorted, size - num_sorted};
  SortUses(num_rows, size - num_sorted, &added, &spare_added);
  if (added.data() != middle) std::copy(added.begin(), added.end(), middle);
  std::merge(uses->data(), middle, middle, uses->data() + size, spare->data());
  std::swap(*uses, *spare);
}

// Calls `visit(row, first, last)` for each row. The uses of the row are in the
// range [first, last).
template <typename Visit>
void ForRowsOfUses(const RowUse* uses, int64_t size, const Visit& visit) {
  for (int64_t first = 0; first < size;) {
    const int64_t row = RowOfUse(uses[first]);
    int64_t last = first + 1;
    while (last < size && RowOfUse(uses[last]) == row) ++last;
    visit(row, first, last);
    first = last;
  }
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_KEYS_ROW_USES_H_
