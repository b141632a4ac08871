#include "cc/core/memory/kept_memory.h"

#include <cstddef>
#include <mutex>
#include <new>
#include <vector>

namespace layoutmap {
namespace {

// The pool keeps no blocks under AddressSanitizer, because AddressSanitizer
// must observe each allocation and deallocation with its exact size.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kKeeps = false;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
constexpr bool kKeeps = false;
#else
constexpr bool kKeeps = true;
#endif
#else
constexpr bool kKeeps = true;
#endif

// Minimum size of the blocks that the pool keeps. The C library itself keeps
// smaller blocks.
constexpr size_t kSmallest = size_t{64} << 10;
constexpr size_t kMaxKeptBytes = size_t{64} << 20;

bool IsKept(size_t size) {
  return kKeeps && size >= kSmallest && size <= kMaxKeptBytes;
}

// Returns the size of the block to allocate for `size` bytes. The function
// rounds the size up to one of four block sizes per power of two. If the next
// batch has a slightly different size, it can therefore use the same block. The
// unused end of a block takes no physical memory, because it is never written.
size_t BlockSize(size_t size) {
  size_t quarter = kSmallest / 4;
  while (8 * quarter < size) quarter *= 2;
  return (size + quarter - 1) / quarter * quarter;
}

class KeptBlocks {
 public:
  // Removes a block of this size from the pool and returns it. Returns null if
  // the pool has no block of this size.
  void* Take(size_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    // The search begins with the most recently returned block, which may still
    // be in a cache.
    for (size_t i = blocks_.size(); i-- > 0;) {
      if (blocks_[i].size != size) continue;
      void* const memory = blocks_[i].memory;
      blocks_.erase(blocks_.begin() + static_cast<ptrdiff_t>(i));
      total_ -= size;
      return memory;
    }
    return nullptr;
  }

  void Return(void* memory, size_t size) noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    // The loop frees the blocks that were returned to the pool earliest.
    size_t num_evicted = 0;
    for (; total_ + size > kMaxKeptBytes; ++num_evicted) {
      total_ -= blocks_[num_evicted].size;
      ::operator delete(blocks_[num_evicted].memory);
    }
    blocks_.erase(blocks_.begin(),
                  blocks_.begin() + static_cast<ptrdiff_t>(num_evicted));
    blocks_.push_back(
        // This call does not allocate memory, because the capacity is reserved.
        {memory, size});
    total_ += size;
  }

  KeptBlocks() { blocks_.reserve(kMaxKeptBytes / kSmallest); }

 private:
  struct Block {
    void* memory;
    size_t size;
  };

  std::mutex mutex_;
  // The blocks of the pool in the order in which they were returned. `mutex_`
  // guards all members.
  std::vector<Block> blocks_;
  size_t total_ = 0;
};

// The pool is never destroyed, because threads may return memory while the
// process exits.
KeptBlocks& Kept() {
  static KeptBlocks* const kept = new KeptBlocks;
  return *kept;
}

}  // namespace

void* TakeMemory(size_t size) {
  if (!IsKept(size)) return ::operator new(size);
  const size_t block_size = BlockSize(size);
  void* const kept = Kept().Take(block_size);
  return kept != nullptr ? kept : ::operator new(block_size);
}

void ReturnMemory(void* memory, size_t size) noexcept {
  if (memory == nullptr) return;
  if (!IsKept(size)) return ::operator delete(memory);
  Kept().Return(memory, BlockSize(size));
}

}  // namespace layoutmap
