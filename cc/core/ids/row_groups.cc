#include "cc/core/ids/row_groups.h"

#include <cstdint>

#include "cc/core/base/views.h"

namespace layoutmap {

int64_t RowGroups::num_rows() const {
  int64_t sum = 0;
  for (const Part& part : parts) sum += part.num_rows;
  return sum;
}

int64_t RowGroups::num_positions() const {
  int64_t sum = 0;
  for (const Part& part : parts) sum += part.num_positions;
  return sum;
}

void RowGroups::Add(Span<const int64_t> row_of, uint32_t row) {
  const int64_t first = row_of.size();
  int64_t size = 0;
  for (int64_t i = 0; i < row_of.size(); ++i) {
    if (row_of[i] < 0) positions[first + size++] = static_cast<uint32_t>(i);
  }
  if (size == 0) return;
  rows[first] = row;
  starts[first] = 0;
  parts.push_back({first, 1, size});
}

void RowGroups::Renumber(Span<const int64_t> row_of) {
  number_of.resize(row_of.size());
  uint32_t next = 0;
  for (int64_t i = 0; i < row_of.size(); ++i) {
    number_of[i] = next;
    next += row_of[i] >= 0;
  }
}

}  // namespace layoutmap
