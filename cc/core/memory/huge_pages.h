// Large memory in large pages.

#ifndef TF_LAYOUTMAP_CORE_MEMORY_HUGE_PAGES_H_
#define TF_LAYOUTMAP_CORE_MEMORY_HUGE_PAGES_H_

#include <atomic>
#include <cstddef>

namespace layoutmap {

// Asks the system for pages of 2 MiB in all of `data` that fills such pages:
// random rows then rarely wait for the address of a page, and memory that was
// never written to is cleared 512 pages at a time. Only a hint: what the system
// does not offer changes nothing. Pays before the first write.
void AdviseHugePages(void* data, size_t num_bytes);

struct MemoryRange {
  const void* data = nullptr;
  size_t num_bytes = 0;
};

// Has the system move what is in `range` into such pages, one after the other,
// until `stop`. Others may read, write and even free the memory meanwhile.
// Returns whether all of it is there: the system may not know how (before Linux
// 6.1), or have no such page left.
bool MoveToHugePages(const MemoryRange& range, const std::atomic<bool>& stop);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_MEMORY_HUGE_PAGES_H_
