#include "cc/core/simd/random_kernels.h"

#include "cc/core/simd/row_kernels.h"

namespace layoutmap {

namespace isa_base {
extern const RandomKernels kRandomKernels;
}
#if defined(__x86_64__)
namespace isa_avx2 {
extern const RandomKernels kRandomKernels;
}
namespace isa_avx512 {
extern const RandomKernels kRandomKernels;
}
#endif

const RandomKernels& RandomKernelsFor(CpuLevel level) {
  switch (level) {
#if defined(__x86_64__)
    case CpuLevel::kAvx512:
      return isa_avx512::kRandomKernels;
    case CpuLevel::kAvx2:
      return isa_avx2::kRandomKernels;
#endif
    default:
      return isa_base::kRandomKernels;
  }
}

}  // namespace layoutmap
