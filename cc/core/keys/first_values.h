// Initial values for the rows of new keys.

#ifndef TF_LAYOUTMAP_CORE_KEYS_FIRST_VALUES_H_
#define TF_LAYOUTMAP_CORE_KEYS_FIRST_VALUES_H_

#include <cstdint>
#include <string>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/simd/key_kernels.h"

namespace layoutmap {

// A distribution of initial values. The values only depend on seed, key and
// column, and not on the row or the step. A key that is inserted again gets the
// same initial values.
struct FirstValues {
  enum class Kind {
    kConstant,         // a
    kUniform,          // in [a, b)
    kNormal,           // mean a, standard deviation b
    kTruncatedNormal,  // normal, limited to two standard deviations
  };

  Kind kind = Kind::kConstant;
  float a = 0;
  float b = 0;
  uint64_t seed = 0;  // derived from vocabulary and table
};

Status ParseFirstValues(const std::string& name, FirstValues::Kind* kind);

// Fills the row of a key. Results are bitwise identical on all machines: sqrt,
// which is exact, is the only C library function used.
void FillFirstValues(
    const FirstValues& first_values, int64_t key, Span<float> row,
    const KeyKernels& kernels = KeyKernelsFor(CurrentCpuLevel()));

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_KEYS_FIRST_VALUES_H_
