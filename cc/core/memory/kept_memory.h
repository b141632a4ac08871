// A memory pool that keeps the memory of one step for the next step.

#ifndef TF_LAYOUTMAP_CORE_MEMORY_KEPT_MEMORY_H_
#define TF_LAYOUTMAP_CORE_MEMORY_KEPT_MEMORY_H_

#include <cstddef>

namespace layoutmap {

// Returns at least `size` bytes of uninitialized memory, which must be released
// with `ReturnMemory`. Throws std::bad_alloc. Both functions are thread-safe.
//
// Consecutive steps need about the same amount of memory. The C library returns
// large blocks to the kernel, and the kernel clears every page at the next
// allocation. In a step with 160,000 keys, clearing these pages took a third of
// the time. The pool therefore keeps the most recently returned blocks, up to
// 64 MiB.
void* TakeMemory(size_t size);

// Releases memory from `TakeMemory`. `size` must be the size that was passed to
// `TakeMemory`.
void ReturnMemory(void* memory, size_t size) noexcept;

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_MEMORY_KEPT_MEMORY_H_
