// Memory of a step, kept for the next one.

#ifndef TF_LAYOUTMAP_CORE_MEMORY_KEPT_MEMORY_H_
#define TF_LAYOUTMAP_CORE_MEMORY_KEPT_MEMORY_H_

#include <cstddef>

namespace layoutmap {

// At least `size` bytes, of any values, for `ReturnMemory`. Throws
// std::bad_alloc. Any thread may call both.
//
// A step needs as much memory as the one before it. The C library gives large
// blocks back to the system, which clears every page when they are asked for
// again: a third of a step of 160,000 keys went into that. So the blocks that
// were returned last are kept, 64 MiB of them at most.
void* TakeMemory(size_t size);

// `size` is that of `TakeMemory`.
void ReturnMemory(void* memory, size_t size) noexcept;

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_MEMORY_KEPT_MEMORY_H_
