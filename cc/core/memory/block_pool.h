// A pool of memory for many small pieces, such as strings.

#ifndef TF_LAYOUTMAP_CORE_MEMORY_BLOCK_POOL_H_
#define TF_LAYOUTMAP_CORE_MEMORY_BLOCK_POOL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace layoutmap {

// Memory for pieces of different sizes. In contrast to the C library, a piece
// has no header, its address takes 40 bits, and the pool reads no memory of a
// returned piece, which is usually not in a cache. A returned piece is reused
// for a piece of the same size only, so the owner of the pieces must move them
// to a new pool if the returned pieces take too much memory. The caller must
// synchronize calls.
class BlockPool {
 public:
  // Location of a piece, in [1, 2^40).
  using Place = uint64_t;
  static constexpr int kPlaceBits = 40;
  // Larger pieces have their own block, which is freed when it is returned.
  static constexpr int64_t kMaxSharedBytes = 1024;

  // Returns a piece of uninitialized memory with at least `num_bytes`, which
  // must be positive. The piece is aligned to 8 bytes. Throws std::bad_alloc.
  Place Take(int64_t num_bytes);

  // Returns a piece to the pool. `num_bytes` must be the size that was passed
  // to `Take`.
  void Return(Place place, int64_t num_bytes);

  char* At(Place place) const {
    return chunks_[place / kUnitsPerChunk] + place % kUnitsPerChunk * kUnit;
  }

  // Bytes of the pieces that are in use, with their padding to 8 bytes.
  int64_t num_used_bytes() const { return num_used_ * kUnit; }
  // Bytes that `Return` or the end of a block has made available.
  int64_t num_free_bytes() const { return num_free_ * kUnit; }
  // Bytes of all blocks.
  int64_t num_block_bytes() const { return num_block_bytes_; }

 private:
  struct Delete {
    void operator()(char* memory) const;
    size_t alignment = 0;
  };
  using Memory = std::unique_ptr<char[], Delete>;

  static constexpr int64_t kUnit = 8;
  // A block consists of chunks. The number of a chunk and the unit in the chunk
  // are the place of a piece, so that places do not depend on the sizes of
  // blocks.
  static constexpr int64_t kUnitsPerChunk = 8192;
  static constexpr int64_t kChunkBytes = kUnitsPerChunk * kUnit;
  // A pool that has at least this size gets blocks of this size, in huge pages.
  static constexpr int64_t kHugeBlockBytes = int64_t{2} << 20;
  // Distance at which `Take` prefetches returned pieces, in pieces.
  static constexpr size_t kPiecesAhead = 8;

  static int64_t NumUnits(int64_t num_bytes) {
    return (num_bytes + kUnit - 1) / kUnit;
  }
  static bool IsShared(int64_t num_units) {
    return num_units <= kMaxSharedBytes / kUnit;
  }

  static Memory NewMemory(int64_t num_bytes, size_t alignment);
  // Adds a block that has `num_chunks` chunks, or one chunk of any size.
  // Returns the number of its first chunk.
  int64_t AddChunks(Memory memory, int64_t num_chunks);
  // Adds a block for small pieces.
  void AddSharedBlock();
  // Returns a piece that has its own block.
  Place TakeBlock(int64_t num_bytes);
  // Makes `size` units available for pieces of this size.
  void AddFree(Place place, int64_t size);

  // The first bytes of the chunks.
  std::vector<char*> chunks_;
  // For the first chunk of each block, its memory.
  std::vector<Memory> memory_;
  // Numbers of chunks without memory.
  std::vector<int64_t> unused_chunks_;
  // The returned pieces of n units are in free_[n].
  std::vector<std::vector<Place>> free_;
  // The places of the last shared block that were never used.
  Place next_ = 0;
  Place end_ = 0;
  int64_t num_used_ = 0;
  int64_t num_free_ = 0;
  int64_t num_block_bytes_ = 0;
};

inline BlockPool::Place BlockPool::Take(int64_t num_bytes) {
  const int64_t size = NumUnits(num_bytes);
  if (!IsShared(size)) return TakeBlock(num_bytes);
  if (static_cast<size_t>(size) < free_.size() && !free_[size].empty()) {
    std::vector<Place>& pieces = free_[size];
    const Place place = pieces.back();
    pieces.pop_back();
    if (pieces.size() >= kPiecesAhead) {
      __builtin_prefetch(At(pieces[pieces.size() - kPiecesAhead]), /*rw=*/1);
    }
    num_used_ += size;
    num_free_ -= size;
    return place;
  }
  if (static_cast<int64_t>(end_ - next_) < size) AddSharedBlock();
  const Place place = next_;
  next_ += size;
  num_used_ += size;
  return place;
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_MEMORY_BLOCK_POOL_H_
