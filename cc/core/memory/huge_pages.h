// Functions that place large memory blocks in huge pages.

#ifndef TF_LAYOUTMAP_CORE_MEMORY_HUGE_PAGES_H_
#define TF_LAYOUTMAP_CORE_MEMORY_HUGE_PAGES_H_

#include <atomic>
#include <cstddef>

namespace layoutmap {

// Advises the kernel to use 2 MiB pages for the part of `data` that fills
// complete pages of this size. Random row accesses then cause fewer TLB misses,
// and the kernel clears new memory 512 base pages at a time. The call has no
// effect if huge pages are not available. Call this function before the first
// write to `data`.
void AdviseHugePages(void* data, size_t num_bytes);

struct MemoryRange {
  const void* data = nullptr;
  size_t num_bytes = 0;
};

// Moves the memory in `range` to huge pages, one page at a time, until `stop`
// is true. Other threads may read, write and free the memory during the call.
// Returns true if all of the memory is in huge pages after the call. Returns
// false if the kernel is older than Linux 6.1 and does not support the move, or
// if the kernel has no free huge page.
bool MoveToHugePages(const MemoryRange& range, const std::atomic<bool>& stop);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_MEMORY_HUGE_PAGES_H_
