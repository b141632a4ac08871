// Large memory in large pages.

#ifndef TF_LAYOUTMAP_CORE_BASE_HUGE_PAGES_H_
#define TF_LAYOUTMAP_CORE_BASE_HUGE_PAGES_H_

#include <cstddef>

namespace layoutmap {

// Asks the system for pages of 2 MiB in all of `data` that fills such pages:
// random rows then rarely wait for the address of a page, and memory that was
// never written to is cleared 512 pages at a time. Only a hint: what the system
// does not offer changes nothing. Pays before the first write.
void AdviseHugePages(void* data, size_t num_bytes);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_BASE_HUGE_PAGES_H_
