// Huge pages for large memory blocks.

#ifndef TF_LAYOUTMAP_CORE_MEMORY_HUGE_PAGES_H_
#define TF_LAYOUTMAP_CORE_MEMORY_HUGE_PAGES_H_

#include <atomic>
#include <cstddef>

namespace layoutmap {

// Advises the kernel to use 2 MiB pages for the part of `data` that fills such
// pages. Random row accesses then cause fewer TLB misses, and the kernel clears
// untouched memory 512 base pages at a time. The call is a hint: it has no
// effect where huge pages are not available. Call it before the first write to
// `data`.
void AdviseHugePages(void* data, size_t num_bytes);

struct MemoryRange {
  const void* data = nullptr;
  size_t num_bytes = 0;
};

// Moves the memory in `range` to huge pages, one page at a time, until `stop`
// is true. Other threads may read, write and free the memory during the call.
// Returns whether all of the memory is in huge pages. The result is false if
// the kernel does not support the move (before Linux 6.1) or has no free huge
// page.
bool MoveToHugePages(const MemoryRange& range, const std::atomic<bool>& stop);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_MEMORY_HUGE_PAGES_H_
