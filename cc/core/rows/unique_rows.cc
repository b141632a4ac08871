#include "cc/core/rows/unique_rows.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "cc/core/base/views.h"

namespace layoutmap {
namespace {

// 2^11 counters fill a quarter of a 32 KiB first-level cache, and their write
// streams still fit a second-level TLB; 21 bits (2 M rows) take two passes.
constexpr int kMaxDigitBits = 11;

int BitWidth(uint64_t x) {
  int bits = 0;
  for (; x > 0; x >>= 1) ++bits;
  return bits;
}

// Row above, position below: sorting by row keeps the order of positions, for
// the passes are stable.
using Item = uint64_t;

uint32_t RowOf(Item item) { return static_cast<uint32_t>(item >> 32); }

std::vector<Item> SortByRow(Span<const Span<const uint32_t>> segments,
                            int64_t num_ids, int64_t num_rows) {
  const int bits = std::max(1, BitWidth(std::max<int64_t>(num_rows, 1) - 1));
  const int num_passes = (bits + kMaxDigitBits - 1) / kMaxDigitBits;
  const int digit_bits = (bits + num_passes - 1) / num_passes;
  const uint32_t mask = (uint32_t{1} << digit_bits) - 1;

  std::vector<Item> items(num_ids);
  std::vector<uint32_t> counts(static_cast<size_t>(num_passes) << digit_bits);
  uint32_t position = 0;
  for (Span<const uint32_t> segment : segments) {
    for (uint32_t row : segment) {
      items[position] = Item{row} << 32 | position;
      ++position;
      for (int pass = 0; pass < num_passes; ++pass) {
        ++counts[(pass << digit_bits) + (row >> (pass * digit_bits) & mask)];
      }
    }
  }

  std::vector<Item> sorted(num_ids);
  for (int pass = 0; pass < num_passes; ++pass) {
    uint32_t* next = counts.data() + (pass << digit_bits);
    uint32_t start = 0;
    for (uint32_t digit = 0; digit <= mask; ++digit) {
      start += std::exchange(next[digit], start);
    }
    const int shift = 32 + pass * digit_bits;
    for (Item item : items) {
      sorted[next[item >> shift & mask]++] = item;
    }
    items.swap(sorted);
  }
  return items;
}

}  // namespace

UniqueRows FindUniqueRows(Span<const Span<const uint32_t>> segments,
                          int64_t num_rows) {
  int64_t num_ids = 0;
  for (Span<const uint32_t> segment : segments) num_ids += segment.size();
  const std::vector<Item> items = SortByRow(segments, num_ids, num_rows);

  UniqueRows unique;
  unique.positions.resize(num_ids);
  unique.rows.reserve(num_ids);
  unique.splits.reserve(num_ids + 1);
  for (int64_t k = 0; k < num_ids; ++k) {
    unique.positions[k] = static_cast<uint32_t>(items[k]);
    if (k == 0 || RowOf(items[k]) != RowOf(items[k - 1])) {
      if (k > 0) unique.splits.push_back(k);
      unique.rows.push_back(RowOf(items[k]));
    }
  }
  if (num_ids > 0) unique.splits.push_back(num_ids);
  return unique;
}

}  // namespace layoutmap
