#include "cc/core/keys/first_values.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/simd/key_kernels.h"

namespace layoutmap {
namespace {

// The fraction of a normal distribution that is within two standard deviations,
// erf(sqrt(2)).
constexpr double kShareWithinTwo = 0.95449973610364158;
constexpr double kSqrt2 = 1.4142135623730951;
constexpr double kLn2 = 0.69314718055994531;

// Returns the natural logarithm of x, which must be a positive normal number.
// The logarithm is computed with the series of atanh. The result is much more
// precise than a float.
double Log(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const int exponent = static_cast<int>(bits >> 52) - 1023;
  bits = (bits & 0xFFFFFFFFFFFFFu) | (uint64_t{1023} << 52);
  double mantissa;  // in [1, 2)
  std::memcpy(&mantissa, &bits, sizeof(mantissa));
  const double s = (mantissa - kSqrt2) / (mantissa + kSqrt2);
  const double s2 = s * s;
  double sum = 1.0 / 13;
  for (int n = 11; n >= 1; n -= 2) sum = sum * s2 + 1.0 / n;
  return 2 * s * sum + (exponent + 0.5) * kLn2;
}

double Polynomial(const double (&coefficients)[9], double x) {
  double sum = coefficients[0];
  for (int i = 1; i < 9; ++i) sum = sum * x + coefficients[i];
  return sum;
}

// Returns the inverse error function of a value in (-1, 1) in single precision
// (Giles, "Approximating the erfinv function", GPU Computing Gems, 2011).
double InverseErf(double x) {
  constexpr double kCenter[9] = {
      2.81022636e-08,  3.43273939e-07, -3.5233877e-06,
      -4.39150654e-06, 0.00021858087,  -0.00125372503,
      -0.00417768164,  0.246640727,    1.50140941};
  constexpr double kTails[9] = {-0.000200214257, 0.000100950558, 0.00134934322,
                                -0.00367342844,  0.00573950773,  -0.0076224613,
                                0.00943887047,   1.00167406,     2.83297682};
  const double w = -Log((1 - x) * (1 + x));
  const double p = w < 5 ? Polynomial(kCenter, w - 2.5)
                         : Polynomial(kTails, std::sqrt(w) - 3);
  return p * x;
}

// Maps random bits to the open interval (-1, 1). The possible values are
// symmetric around 0.
double Symmetric(uint64_t bits) {
  constexpr double kStep = 1.0 / (int64_t{1} << 52);
  return (static_cast<double>(bits >> 12) + 0.5) * 2 * kStep - 1;
}

}  // namespace

Status ParseFirstValues(const std::string& name, FirstValues::Kind* kind) {
  if (name == "constant") {
    *kind = FirstValues::Kind::kConstant;
  } else if (name == "uniform") {
    *kind = FirstValues::Kind::kUniform;
  } else if (name == "normal") {
    *kind = FirstValues::Kind::kNormal;
  } else if (name == "truncated_normal") {
    *kind = FirstValues::Kind::kTruncatedNormal;
  } else {
    return InvalidArgument(
        "Initial values must be one of constant, uniform, normal, "
        "truncated_normal. Received: " +
        name);
  }
  return Status();
}

void FillFirstValues(const FirstValues& first_values, int64_t key,
                     Span<float> row, const KeyKernels& kernels) {
  const double a = first_values.a, b = first_values.b;
  uint64_t state =
      MixBits(MixBits(first_values.seed) ^ static_cast<uint64_t>(key));
  if (first_values.kind == FirstValues::Kind::kConstant) {
    std::fill(row.begin(), row.end(), first_values.a);
    return;
  }
  if (first_values.kind == FirstValues::Kind::kUniform) {
    kernels.draw({a, b, state, row.size(), row.data()});
    return;
  }
  const bool is_truncated =
      first_values.kind == FirstValues::Kind::kTruncatedNormal;
  const double share = is_truncated ? kShareWithinTwo : 1;
  for (float& value : row) {
    // Computes the next state of the splitmix64 generator.
    state += 0x9E3779B97F4A7C15u;
    value = static_cast<float>(
        a + b * (kSqrt2 * InverseErf(share * Symmetric(MixBits(state)))));
  }
}

}  // namespace layoutmap
