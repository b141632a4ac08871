// The kernels of all instruction sets, for tests.

#ifndef TF_LAYOUTMAP_CORE_SIMD_ALL_KERNELS_TEST_H_
#define TF_LAYOUTMAP_CORE_SIMD_ALL_KERNELS_TEST_H_

#include <vector>

#include "cc/core/simd/dot_kernels.h"
#include "cc/core/simd/key_kernels.h"
#include "cc/core/simd/random_kernels.h"
#include "cc/core/simd/row_kernels.h"

namespace layoutmap {

// The code for processors without intrinsics, which is compiled for this
// processor. The libraries of the package do not contain it on x86-64.
namespace isa_portable {
extern const RowKernels kRowKernels;
extern const DotKernels kDotKernels;
extern const KeyKernels kKeyKernels;
extern const RandomKernels kRandomKernels;
}  // namespace isa_portable

struct NamedKernels {
  const char* name;
  const RowKernels& rows;
  const DotKernels& dots;
  const KeyKernels& keys;
  const RandomKernels& random;
};

// Returns the kernels of each instruction set that this CPU supports. The first
// ones are the kernels of the baseline.
inline std::vector<NamedKernels> AllKernels() {
  std::vector<NamedKernels> all;
  for (CpuLevel level :
       {CpuLevel::kBaseline, CpuLevel::kAvx2, CpuLevel::kAvx512}) {
    if (!CpuHas(level)) continue;
    all.push_back({CpuLevelName(level), RowKernelsFor(level),
                   DotKernelsFor(level), KeyKernelsFor(level),
                   RandomKernelsFor(level)});
  }
  all.push_back({"portable", isa_portable::kRowKernels,
                 isa_portable::kDotKernels, isa_portable::kKeyKernels,
                 isa_portable::kRandomKernels});
  return all;
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SIMD_ALL_KERNELS_TEST_H_
