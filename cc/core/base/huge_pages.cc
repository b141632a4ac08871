#include "cc/core/base/huge_pages.h"

#include <cstddef>
#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace layoutmap {

void AdviseHugePages(void* data, size_t num_bytes) {
#ifdef MADV_HUGEPAGE
  // Of x86-64, and of aarch64 with pages of 4 KiB.
  constexpr uintptr_t kPage = uintptr_t{1} << 21;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  // Only whole pages, so that nothing of others is changed.
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t last = (begin + num_bytes) / kPage * kPage;
  if (first >= last) return;
  // Its failure is no error: the kernel may have been built without them.
  (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace layoutmap
