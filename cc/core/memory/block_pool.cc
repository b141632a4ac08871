#include "cc/core/memory/block_pool.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include "cc/core/memory/huge_pages.h"

namespace layoutmap {
namespace {

constexpr size_t kCacheLineBytes = 64;

}  // namespace

void BlockPool::Delete::operator()(char* memory) const {
  ::operator delete(memory, std::align_val_t{alignment});
}

BlockPool::Memory BlockPool::NewMemory(int64_t num_bytes, size_t alignment) {
  void* const memory = ::operator new(static_cast<size_t>(num_bytes),
                                      std::align_val_t{alignment});
  return Memory(static_cast<char*>(memory), Delete{alignment});
}

int64_t BlockPool::AddChunks(Memory memory, int64_t num_chunks) {
  // The first chunk has no memory, so that 0 is not a place.
  const auto first = std::max<int64_t>(chunks_.size(), 1);
  const int64_t end = first + num_chunks;
  if (end > (int64_t{1} << kPlaceBits) / kUnitsPerChunk) throw std::bad_alloc();
  memory_.resize(end);
  chunks_.resize(end);
  for (int64_t i = 0; i < num_chunks; ++i) {
    chunks_[first + i] = memory.get() + i * kChunkBytes;
  }
  memory_[first] = std::move(memory);
  return first;
}

void BlockPool::AddSharedBlock() {
  const bool is_huge = num_block_bytes_ >= kHugeBlockBytes;
  const int64_t num_bytes = is_huge ? kHugeBlockBytes : kChunkBytes;
  Memory memory =
      NewMemory(num_bytes, is_huge ? kHugeBlockBytes : kCacheLineBytes);
  if (is_huge) AdviseHugePages(memory.get(), num_bytes);
  const int64_t first = AddChunks(std::move(memory), num_bytes / kChunkBytes);
  num_block_bytes_ += num_bytes;
  // The end of the last block is smaller than a piece, but may be large enough
  // for a smaller piece.
  if (next_ < end_) AddFree(next_, static_cast<int64_t>(end_ - next_));
  next_ = first * kUnitsPerChunk;
  end_ = next_ + num_bytes / kUnit;
}

BlockPool::Place BlockPool::TakeBlock(int64_t num_bytes) {
  Memory memory = NewMemory(num_bytes, kCacheLineBytes);
  int64_t chunk;
  if (unused_chunks_.empty()) {
    chunk = AddChunks(std::move(memory), 1);
  } else {
    chunk = unused_chunks_.back();
    unused_chunks_.pop_back();
    chunks_[chunk] = memory.get();
    memory_[chunk] = std::move(memory);
  }
  num_block_bytes_ += num_bytes;
  num_used_ += NumUnits(num_bytes);
  return chunk * kUnitsPerChunk;
}

void BlockPool::AddFree(Place place, int64_t size) {
  if (static_cast<int64_t>(free_.size()) <= size) free_.resize(size + 1);
  free_[size].push_back(place);
  num_free_ += size;
}

void BlockPool::Return(Place place, int64_t num_bytes) {
  const int64_t size = NumUnits(num_bytes);
  if (IsShared(size)) {
    AddFree(place, size);
  } else {
    const auto chunk = static_cast<int64_t>(place / kUnitsPerChunk);
    unused_chunks_.push_back(chunk);
    memory_[chunk].reset();
    chunks_[chunk] = nullptr;
    num_block_bytes_ -= num_bytes;
  }
  num_used_ -= size;
}

}  // namespace layoutmap
