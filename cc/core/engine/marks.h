// Marks: small matrices that represent the gradients of lookups in a program
// that sums and scales gradients.
//
// A mark is the gradient of a small weight. The program applies the same
// operations to the mark as to its other gradients, and returns the result.
// `ReadMarks` computes from the result the factor of each mark. Gradients are
// numbered. Gradient `number` uses these elements of its mark; all other
// elements are -0:
//
//   * The identity: columns 1 to 7 of row `number % 64`. The first value is a
//     power of two, so that it is scaled without rounding errors. The other
//     values are products of this power and numbers that depend on `number` and
//     have no common structure. Only a multiplication of the mark by one factor
//     multiplies all of them by the same factor.
//   * The coordinates: column 0 of the row with the offset 32. The coordinates
//     of gradients of one lookup have the same inner products as the gradients.
//
// The norm of a mark is therefore the norm of the gradients, and its largest
// element is larger than all elements of the gradients, except for a relative
// difference of 2^-18. The identities are small, so that they do not affect the
// norm. Identity and coordinates are in different rows and columns, so that
// operations on rows or columns are detected.

#ifndef TF_LAYOUTMAP_CORE_ENGINE_MARKS_H_
#define TF_LAYOUTMAP_CORE_ENGINE_MARKS_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"

namespace layoutmap {

// Number of gradients of a replica that can wait for an update.
inline constexpr int64_t kMarkRows = 64;
inline constexpr int64_t kMarkColumns = 8;
inline constexpr int64_t kMarkSize = kMarkRows * kMarkColumns;

using Mark = std::array<float, kMarkSize>;

// Returns the mark of a gradient. `numbers` contains the numbers of the earlier
// gradients of the same lookup, followed by the number of the gradient.
// `coordinates` contains the result of `GradientCoordinates` for these
// gradients.
//
// Values that are not finite are only in column 0. A gradient that is zero has
// a tiny norm, so that its lookup is part of the step.
Mark IssueMark(Span<const int64_t> numbers, Span<const float> coordinates);

struct IssuedMark {
  int64_t number;
  const Mark* mark;
};

struct MarkFactor {
  int64_t number;
  float factor;
};

// Returns whether all values are zero.
bool IsZero(Span<const float> marks);

// Computes the factor of each issued mark in a linear combination of marks,
// [kMarkSize]. `factors` contains the marks that are part of the combination.
// It includes marks that were multiplied by 0, if the signs of the zeros show
// it: negative zeros are added to zeros without a change of sign, unless a
// program adds a positive zero.
//
// Returns FailedPrecondition if the combination contains a mark that is not in
// `issued`, and InvalidArgument if `marks` is not a linear combination of
// marks. Factors that are not finite are allowed. Values of column 0 that are
// not finite are ignored. `where` is appended to error messages.
Status ReadMarks(const std::vector<IssuedMark>& issued, Span<const float> marks,
                 const std::string& where, std::vector<MarkFactor>* factors);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_ENGINE_MARKS_H_
