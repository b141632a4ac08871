#include "cc/core/engine/marks.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"

namespace layoutmap {
namespace {

constexpr int64_t kIdentitySize = kMarkColumns - 1;
using Identity = std::array<double, kIdentitySize>;

// Gradients whose numbers differ by kMarkRows * kGenerations have the same
// identity.
constexpr int64_t kGenerations = 1024;

// Binary exponents of the values of an identity. The values cover a wide range,
// so that thresholds, casts to 16 bits and added constants change some of them.
constexpr int kExponents[kIdentitySize] = {0, -1, -2, -4, -6, -8, -10};

// The exponent of an identity relative to the norm of the gradient. The
// identity contributes less than 2^-17 to the square of the norm.
constexpr int kIdentityExponent = -10;

// The norm of the mark of a gradient that is zero. The smallest value of its
// identity is 2^-80. Products with factors down to 2^-40 are normal floats.
constexpr double kSmallestNorm = 1.0 / (int64_t{1} << 60);

// Relative difference that the rounding errors of several hundred operations
// can cause. Casts to 16 bits cause differences of at least 2^-12.
constexpr double kTolerance = 1.0 / (1 << 16);
// Absolute difference, because tiny values may be replaced by zero.
constexpr double kTiny = 1e-37;

int64_t PlaceOf(int64_t number) { return number % kMarkRows; }

int64_t CoordinateOf(int64_t number) {
  return (PlaceOf(number) + kMarkRows / 2) % kMarkRows * kMarkColumns;
}

int64_t IdentityOf(int64_t number) {
  return PlaceOf(number) * kMarkColumns + 1;
}

// The finalizer of the splitmix64 generator.
uint64_t Hash(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Returns the identity of a gradient, whose first value is 1.
Identity IdentityValues(int64_t number) {
  const uint64_t first =
      static_cast<uint64_t>(number % (kMarkRows * kGenerations)) *
      kIdentitySize;
  Identity values;
  values[0] = 1;
  for (int64_t i = 1; i < kIdentitySize; ++i) {
    const uint64_t bits = Hash(first + i);
    // A float has 23 bits behind the leading bit, of which bfloat16 keeps 7 and
    // float16 keeps 10. The two bits behind these are set to 01 or 10, so that
    // rounding changes the value by at least a quarter of the last bit.
    uint64_t mantissa = bits & 0x7fffff;
    for (const int shift : {14, 11}) {
      const uint64_t pair = (bits >> (32 + shift)) & 1 ? 1 : 2;
      mantissa = (mantissa & ~(uint64_t{3} << shift)) | pair << shift;
    }
    const double value =
        std::ldexp(1.0 + std::ldexp(mantissa, -23), kExponents[i]);
    // Each identity has positive and negative values.
    values[i] = i == 1 || bits >> 63 ? -value : value;
  }
  return values;
}

// Returns whether a value equals the expected value up to rounding errors. The
// terms of the expected value have the size `scale`.
bool IsNear(float value, double expected, double scale) {
  return std::fabs(value - expected) <= kTolerance * scale + kTiny;
}

// Returns whether the signs of zeros show that an identity was multiplied by 0.
bool IsMultipliedByZero(const float* zeros, const float* issued) {
  int64_t num_equal = 0;
  for (int64_t i = 0; i < kIdentitySize; ++i) {
    num_equal += std::signbit(zeros[i]) == std::signbit(issued[i]);
  }
  return num_equal == 0 || num_equal == kIdentitySize;
}

// Returns whether `values` are a product of a number and the identity of any
// gradient in this place.
bool IsOfAnyGeneration(const float* values, int64_t place) {
  for (int64_t generation = 0; generation < kGenerations; ++generation) {
    const Identity identity = IdentityValues(place + generation * kMarkRows);
    bool is_equal = values[0] != 0;
    for (int64_t i = 1; i < kIdentitySize && is_equal; ++i) {
      const double expected = values[0] * identity[i];
      is_equal = IsNear(values[i], expected, std::fabs(expected));
    }
    if (is_equal) return true;
  }
  return false;
}

Status NotLinear(const std::string& where) {
  return InvalidArgument(
      "The gradient of a mark weight represents the gradients of tables. Only "
      "sums of such gradients, and products with one number for the full "
      "gradient, can be applied, such as loss scaling, means, clip_by_norm and "
      "clip_by_global_norm. Received: values after another operation, such as "
      "sign, clip_by_value, a mask of elements, noise or a cast to 16 bits, or "
      "the sum of a gradient and a gradient that has expired. "
      "Exclude this weight from the operation, or use a setting of the tables' "
      "optimizers, such as `clipvalue`; tlm.layers.ShardedEmbedding returns "
      "the gradients of its rows instead" +
      where);
}

Status Expired(const std::string& where) {
  return FailedPrecondition(
      "The gradients to apply have expired: they were already applied, or " +
      std::to_string(kMarkRows) +
      " newer gradients, an update of a much newer lookup, a reset or a "
      "restore came first" +
      where);
}

}  // namespace

Mark IssueMark(Span<const int64_t> numbers, Span<const float> coordinates) {
  assert(numbers.size() == coordinates.size() && numbers.size() > 0);
  double square = 0;
  for (const float one : coordinates) square += static_cast<double>(one) * one;
  const double norm =
      std::isfinite(square) ? std::max(std::sqrt(square), kSmallestNorm) : 1.0;
  const int64_t number = numbers[numbers.size() - 1];
  Mark mark;
  mark.fill(-0.0f);
  const double unit = std::ldexp(1.0, std::ilogb(norm) + kIdentityExponent);
  float* const identity = mark.data() + IdentityOf(number);
  double identity_square = 0;
  for (int64_t i = 0; i < kIdentitySize; ++i) {
    identity[i] = static_cast<float>(unit * IdentityValues(number)[i]);
    identity_square += static_cast<double>(identity[i]) * identity[i];
  }
  for (int64_t i = 0; i < numbers.size(); ++i) {
    mark[CoordinateOf(numbers[i])] = coordinates[i];
  }
  // The last coordinate is corrected, so that the norm of the mark is exact.
  float& last = mark[CoordinateOf(number)];
  if (!std::isfinite(square)) return mark;
  const double rest =
      numbers.size() > 1 ? static_cast<double>(last) * last : norm * norm;
  last = static_cast<float>(std::sqrt(std::max(rest - identity_square, 0.0)));
  return mark;
}

bool IsZero(Span<const float> marks) {
  return std::all_of(marks.begin(), marks.end(),
                     [](float value) { return value == 0; });
}

Status ReadMarks(const std::vector<IssuedMark>& issued, Span<const float> marks,
                 const std::string& where, std::vector<MarkFactor>* factors) {
  assert(marks.size() == kMarkSize);
  std::array<const IssuedMark*, kMarkRows> of_place = {};
  for (const IssuedMark& one : issued) of_place[PlaceOf(one.number)] = &one;
  // The coordinates of the linear combination, and the sizes of their terms.
  std::array<double, kMarkRows> sums = {}, scales = {};
  bool has_other_nan = false;
  for (int64_t place = 0; place < kMarkRows; ++place) {
    const float* const values = marks.data() + IdentityOf(place);
    const IssuedMark* const one = of_place[place];
    if (IsZero({values, kIdentitySize})) {
      if (one != nullptr &&
          IsMultipliedByZero(values, one->mark->data() + IdentityOf(place))) {
        factors->push_back({one->number, 0.0f});
      }
      continue;
    }
    if (one == nullptr && std::all_of(values, values + kIdentitySize,
                                      [](float v) { return std::isnan(v); })) {
      // The program multiplied all elements by NaN.
      has_other_nan = true;
      continue;
    }
    if (one == nullptr) {
      return IsOfAnyGeneration(values, place) ? Expired(where)
                                              : NotLinear(where);
    }
    const float* const identity = one->mark->data() + IdentityOf(place);
    const float factor = values[0] / identity[0];
    for (int64_t i = 1; i < kIdentitySize && std::isfinite(factor); ++i) {
      const double expected = static_cast<double>(factor) * identity[i];
      if (IsNear(values[i], expected, std::fabs(expected))) continue;
      return IsOfAnyGeneration(values, place) ? Expired(where)
                                              : NotLinear(where);
    }
    factors->push_back({one->number, factor});
    for (int64_t row = 0; row < kMarkRows; ++row) {
      const float coordinate = (*one->mark)[row * kMarkColumns];
      if (coordinate == 0) continue;
      const double term = static_cast<double>(factor) * coordinate;
      sums[row] += term;
      scales[row] += std::fabs(term);
    }
  }
  if (has_other_nan && factors->empty()) return Expired(where);
  for (int64_t row = 0; row < kMarkRows; ++row) {
    const float value = marks[row * kMarkColumns];
    // NaN shows that a gradient of this replica or of another one is not
    // finite. A sum that is not finite contains such a gradient.
    if (!std::isfinite(value) || !std::isfinite(sums[row])) continue;
    if (!IsNear(value, sums[row], scales[row])) return NotLinear(where);
  }
  return Status();
}

}  // namespace layoutmap
