// Initial values for the rows of new keys.

#ifndef TF_LAYOUTMAP_CORE_KEYS_FIRST_VALUES_H_
#define TF_LAYOUTMAP_CORE_KEYS_FIRST_VALUES_H_

#include <cstdint>
#include <string>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/simd/key_kernels.h"

namespace layoutmap {

// A distribution of initial values. The values depend only on the seed, the key
// and the column. They do not depend on the row or the step. If a key is
// evicted and inserted again, it gets the same initial values.
struct FirstValues {
  enum class Kind {
    // All values are a.
    kConstant,
    // The values are uniformly distributed in [a, b).
    kUniform,
    // The values have mean a and standard deviation b.
    kNormal,
    // A normal distribution that is limited to two standard deviations.
    kTruncatedNormal,
  };

  Kind kind = Kind::kConstant;
  float a = 0;
  float b = 0;
  // The seed is derived from the vocabulary and the table.
  uint64_t seed = 0;
};

Status ParseFirstValues(const std::string& name, FirstValues::Kind* kind);

// Fills the row of a key with its initial values. Results are bitwise identical
// on all machines, because the only C library function in use is sqrt, which
// rounds correctly.
void FillFirstValues(
    const FirstValues& first_values, int64_t key, Span<float> row,
    const KeyKernels& kernels = KeyKernelsFor(CurrentCpuLevel()));

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_KEYS_FIRST_VALUES_H_
