#include "cc/core/memory/kept_memory.h"

#include <cstddef>
#include <mutex>
#include <new>
#include <vector>

namespace layoutmap {
namespace {

// AddressSanitizer has to see each block come and go, at its own size.
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

// The C library keeps smaller blocks by itself.
constexpr size_t kSmallest = size_t{64} << 10;
constexpr size_t kMostKept = size_t{64} << 20;

bool IsKept(size_t size) {
  return kKeeps && size >= kSmallest && size <= kMostKept;
}

// Batches differ a little: blocks have four sizes between powers of two, so
// that one serves the next batch, too. What is never written to takes no
// memory.
size_t BlockSize(size_t size) {
  size_t quarter = kSmallest / 4;
  while (8 * quarter < size) quarter *= 2;
  return (size + quarter - 1) / quarter * quarter;
}

class KeptBlocks {
 public:
  // Null if none has this size.
  void* Take(size_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    // The one returned last may still be in a cache.
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
    // Those that nobody has asked for longest make room.
    size_t num_gone = 0;
    for (; total_ + size > kMostKept; ++num_gone) {
      total_ -= blocks_[num_gone].size;
      ::operator delete(blocks_[num_gone].memory);
    }
    blocks_.erase(blocks_.begin(),
                  blocks_.begin() + static_cast<ptrdiff_t>(num_gone));
    blocks_.push_back({memory, size});  // Within the room that is reserved.
    total_ += size;
  }

  KeptBlocks() { blocks_.reserve(kMostKept / kSmallest); }

 private:
  struct Block {
    void* memory;
    size_t size;
  };

  std::mutex mutex_;
  // All of it by `mutex_`. By the time of their return.
  std::vector<Block> blocks_;
  size_t total_ = 0;
};

// Never destroyed: threads may still return memory when the process ends.
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
