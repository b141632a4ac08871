// Functions that loop over the columns of a row. Include this file only from
// files that are compiled once per instruction set.

#ifndef TF_LAYOUTMAP_CORE_SIMD_COLUMNS_H_
#define TF_LAYOUTMAP_CORE_SIMD_COLUMNS_H_

#include <cstdint>

#include "cc/core/simd/vector.h"

namespace layoutmap {
namespace LM_ISA {

// Calls visit(c, Vector) for each full register of columns, and visit(c, float)
// for each remaining column. The value of the second argument is not used. Its
// type selects the overload of `visit`.
template <typename Visit>
static inline void ForColumns(int64_t dim, const Visit& visit) {
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) visit(c, Vector{});
  for (; c < dim; ++c) visit(c, 0.0f);
}

// Returns the sum of the values that `visit` returns for the columns. There are
// 16 partial sums. The value of column c is added to partial sum c % 16, and
// the partial sums are then added in pairs. The order of the additions does not
// depend on the register width, so results are bitwise identical for all
// instruction sets.
template <typename Visit>
static inline float SumColumns(int64_t dim, const Visit& visit) {
  constexpr int kParts = 16;
  constexpr int kRegisters = kParts / kLanes;
  Vector sums[kRegisters];
  for (int r = 0; r < kRegisters; ++r) sums[r] = Vector{};
  int64_t c = 0;
  for (; c + kParts <= dim; c += kParts) {
    for (int r = 0; r < kRegisters; ++r) {
      sums[r] += visit(c + r * kLanes, Vector{});
    }
  }
  float parts[kParts];
  for (int r = 0; r < kRegisters; ++r) Store(parts + r * kLanes, sums[r]);
  for (int i = 0; c < dim; ++c, ++i) parts[i] += visit(c, 0.0f);
  for (int size = kParts / 2; size > 0; size /= 2) {
    for (int i = 0; i < size; ++i) parts[i] += parts[i + size];
  }
  return parts[0];
}

}  // namespace LM_ISA
}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SIMD_COLUMNS_H_
