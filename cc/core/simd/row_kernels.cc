#include "cc/core/simd/row_kernels.h"

#include <cstdlib>
#include <cstring>

namespace layoutmap {

namespace isa_base {
extern const RowKernels kRowKernels;
}
#if defined(__x86_64__)
namespace isa_avx2 {
extern const RowKernels kRowKernels;
}
namespace isa_avx512 {
extern const RowKernels kRowKernels;
}
#endif

namespace {

constexpr CpuLevel kLevels[] = {CpuLevel::kAvx512, CpuLevel::kAvx2,
                                CpuLevel::kBaseline};

CpuLevel Detect() {
  const char* cap = std::getenv("TF_LAYOUTMAP_CPU_LEVEL");
  bool below_cap = cap == nullptr;
  for (CpuLevel level : kLevels) {
    below_cap = below_cap || std::strcmp(cap, CpuLevelName(level)) == 0;
    if (below_cap && CpuHas(level)) return level;
  }
  return CpuLevel::kBaseline;
}

}  // namespace

const char* CpuLevelName(CpuLevel level) {
  switch (level) {
    case CpuLevel::kBaseline:
      return "baseline";
    case CpuLevel::kAvx2:
      return "avx2";
    case CpuLevel::kAvx512:
      return "avx512";
  }
  return "unknown";
}

bool CpuHas(CpuLevel level) {
  switch (level) {
    case CpuLevel::kBaseline:
      return true;
#if defined(__x86_64__)
    case CpuLevel::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case CpuLevel::kAvx512:
      return __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl");
#endif
    default:
      return false;
  }
}

CpuLevel CurrentCpuLevel() {
  static const CpuLevel level = Detect();
  return level;
}

const RowKernels& RowKernelsFor(CpuLevel level) {
  switch (level) {
#if defined(__x86_64__)
    case CpuLevel::kAvx512:
      return isa_avx512::kRowKernels;
    case CpuLevel::kAvx2:
      return isa_avx2::kRowKernels;
#endif
    default:
      return isa_base::kRowKernels;
  }
}

}  // namespace layoutmap
