// The values that the row of a new key starts with.

#ifndef TF_LAYOUTMAP_CORE_KEYS_FIRST_VALUES_H_
#define TF_LAYOUTMAP_CORE_KEYS_FIRST_VALUES_H_

#include <cstdint>
#include <string>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/simd/key_kernels.h"

namespace layoutmap {

// A distribution. Its values are a function of seed, key and column, whatever
// the row and the step: a key that comes back starts as it first did.
struct FirstValues {
  enum class Kind {
    kConstant,         // a
    kUniform,          // in [a, b)
    kNormal,           // mean a, standard deviation b
    kTruncatedNormal,  // the same of what is within two of the deviations
  };

  Kind kind = Kind::kConstant;
  float a = 0;
  float b = 0;
  uint64_t seed = 0;  // of the vocabulary and the table
};

Status ParseFirstValues(const std::string& name, FirstValues::Kind* kind);

// Fills the row of a key. The same bits on every machine: no function of the
// C library but sqrt, which is exact.
void FillFirstValues(
    const FirstValues& first_values, int64_t key, Span<float> row,
    const KeyKernels& kernels = KeyKernelsFor(CurrentCpuLevel()));

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_KEYS_FIRST_VALUES_H_
