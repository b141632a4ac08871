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

// Of x86-64, and of aarch64 with pages of 4 KiB.
constexpr uintptr_t kPage = uintptr_t{1} << 21;

// The whole pages inside of some memory, so that nothing of others is changed.
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
  // Its failure is no error: the kernel may have been built without them.
  (void)madvise(reinterpret_cast<void*>(pages.first), pages.last - pages.first,
                MADV_HUGEPAGE);
#endif
}

bool MoveToHugePages(const MemoryRange& range, const std::atomic<bool>& stop) {
#ifdef __linux__
  // MADV_COLLAPSE of Linux 6.1, which older headers do not name.
  constexpr int kCollapse = 25;
  const Pages pages(range.data, range.num_bytes);
  bool is_whole = true;
  for (uintptr_t page = pages.first; page < pages.last; page += kPage) {
    if (stop.load(std::memory_order_relaxed)) return false;
    if (madvise(reinterpret_cast<void*>(page), kPage, kCollapse) == 0) continue;
    is_whole = false;
    // A page that is in use at this moment stays where it is.
    if (errno != EAGAIN && errno != EBUSY) return false;
  }
  return is_whole;
#else
  return false;
#endif
}

}  // namespace layoutmap
