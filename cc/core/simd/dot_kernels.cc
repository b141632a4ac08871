#include "cc/core/simd/dot_kernels.h"

#include "cc/core/simd/row_kernels.h"

namespace layoutmap {

namespace isa_base {
extern const DotKernels kDotKernels;
}
#if defined(__x86_64__)
namespace isa_avx2 {
extern const DotKernels kDotKernels;
}
namespace isa_avx512 {
extern const DotKernels kDotKernels;
}
#endif

const DotKernels& DotKernelsFor(CpuLevel level) {
  switch (level) {
#if defined(__x86_64__)
    case CpuLevel::kAvx512:
      return isa_avx512::kDotKernels;
    case CpuLevel::kAvx2:
      return isa_avx2::kDotKernels;
#endif
    default:
      return isa_base::kDotKernels;
  }
}

}  // namespace layoutmap
