// Random numbers of TensorFlow's generator on CPUs, Philox 4x32-10. The numbers
// are bitwise identical for every instruction set.

#ifndef TF_LAYOUTMAP_CORE_SIMD_RANDOM_KERNELS_H_
#define TF_LAYOUTMAP_CORE_SIMD_RANDOM_KERNELS_H_

#include <cstdint>

#include "cc/core/simd/row_kernels.h"

namespace layoutmap {

// State of a generator. The low word of the counter is first.
struct PhiloxState {
  uint32_t counter[4];
  uint32_t key[2];
};

struct RandomKernels {
  // Writes the next `size` uniform numbers to `data`:
  //
  //   data[i] = (number in [0, 1)) * factor + offset
  //
  // The product and the sum are rounded separately. Each value of the counter
  // generates four numbers.
  void (*fill_uniform)(PhiloxState state, float factor, float offset,
                       int64_t size, float* data);
};

const RandomKernels& RandomKernelsFor(CpuLevel level);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SIMD_RANDOM_KERNELS_H_
