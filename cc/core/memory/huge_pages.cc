#include "cc/core/memory/huge_pages.h"

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace layoutmap {
namespace {

// Size of a huge page in bytes on x86-64, and on aarch64 with 4 KiB base pages.
constexpr uintptr_t kPage = uintptr_t{1} << 21;

// The huge pages that are completely inside a memory range. The calls to the
// kernel therefore do not affect neighboring memory.
struct Pages {
  Pages(const void* data, size_t num_bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(data);
    first = (begin + kPage - 1) / kPage * kPage;
    last = (begin + num_bytes) / kPage * kPage;
  }
  uintptr_t first, last;
};

}  // namespace

void AdviseHugePages(void* data, size_t num_bytes) {
#ifdef MADV_HUGEPAGE
  const Pages pages(data, num_bytes);
  if (pages.first >= pages.last) return;
  // The return value is ignored because the call fails if the kernel was built
  // without transparent huge pages.
  (void)madvise(reinterpret_cast<void*>(pages.first), pages.last - pages.first,
                MADV_HUGEPAGE);
#endif
}

bool MoveToHugePages(const MemoryRange& range, const std::atomic<bool>& stop) {
#ifdef __linux__
  // The value of MADV_COLLAPSE, which is available since Linux 6.1. Older
  // system headers do not define this constant.
  constexpr int kCollapse = 25;
  const Pages pages(range.data, range.num_bytes);
  bool is_complete = true;
  for (uintptr_t page = pages.first; page < pages.last; page += kPage) {
    if (stop.load(std::memory_order_relaxed)) return false;
    if (madvise(reinterpret_cast<void*>(page), kPage, kCollapse) == 0) continue;
    is_complete = false;
    // The kernel returns these errors if a page is currently in use. The loop
    // then continues with the next page.
    if (errno != EAGAIN && errno != EBUSY) return false;
  }
  return is_complete;
#else
  return false;
#endif
}

}  // namespace layoutmap
