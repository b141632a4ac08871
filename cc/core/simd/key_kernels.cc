#include "cc/core/simd/key_kernels.h"

#include "cc/core/simd/row_kernels.h"

namespace layoutmap {

namespace isa_base {
extern const KeyKernels kKeyKernels;
}
#if defined(__x86_64__)
namespace isa_avx2 {
extern const KeyKernels kKeyKernels;
}
namespace isa_avx512 {
extern const KeyKernels kKeyKernels;
}
#endif

const KeyKernels& KeyKernelsFor(CpuLevel level) {
  switch (level) {
#if defined(__x86_64__)
    case CpuLevel::kAvx512:
      return isa_avx512::kKeyKernels;
    case CpuLevel::kAvx2:
      return isa_avx2::kKeyKernels;
#endif
    default:
      return isa_base::kKeyKernels;
  }
}

}  // namespace layoutmap
