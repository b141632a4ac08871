#include "cc/core/memory/block_pool.h"

#include <cstdint>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace layoutmap {
namespace {

// A piece, and the byte that fills it.
struct Piece {
  BlockPool::Place place;
  int64_t num_bytes;
  char fill;
};

Piece TakeFilled(BlockPool* pool, int64_t num_bytes, char fill) {
  const BlockPool::Place place = pool->Take(num_bytes);
  std::memset(pool->At(place), fill, static_cast<size_t>(num_bytes));
  return {place, num_bytes, fill};
}

bool IsIntact(const BlockPool& pool, const Piece& piece) {
  const std::string bytes(static_cast<size_t>(piece.num_bytes), piece.fill);
  return std::memcmp(pool.At(piece.place), bytes.data(), bytes.size()) == 0;
}

int64_t PaddedBytes(int64_t num_bytes) { return (num_bytes + 7) / 8 * 8; }

TEST(BlockPoolTest, PiecesKeepTheirBytesWhileOthersAreTakenAndReturned) {
  std::mt19937 random(3);
  BlockPool pool;
  std::vector<Piece> pieces;
  int64_t num_used_bytes = 0;
  for (int i = 0; i < 40000; ++i) {
    if (pieces.size() < 100 || random() % 5 < 3) {
      // One piece in 16 is larger than a chunk of 64 KiB or has its own block.
      const int64_t max_bytes = random() % 16 == 0 ? 100000 : 64;
      const auto num_bytes = static_cast<int64_t>(1 + random() % max_bytes);
      pieces.push_back(
          TakeFilled(&pool, num_bytes, static_cast<char>(random())));
      ASSERT_GE(pieces.back().place, 1u);
      ASSERT_LT(pieces.back().place,
                BlockPool::Place{1} << BlockPool::kPlaceBits);
      ASSERT_EQ(reinterpret_cast<uintptr_t>(pool.At(pieces.back().place)) % 8,
                0u);
      num_used_bytes += PaddedBytes(num_bytes);
      // The test would otherwise use too much memory.
      if (num_bytes < 10000) continue;
    }
    std::swap(pieces[random() % pieces.size()], pieces.back());
    ASSERT_TRUE(IsIntact(pool, pieces.back()));
    pool.Return(pieces.back().place, pieces.back().num_bytes);
    num_used_bytes -= PaddedBytes(pieces.back().num_bytes);
    pieces.pop_back();
    ASSERT_EQ(pool.num_used_bytes(), num_used_bytes);
  }
  std::set<BlockPool::Place> places;
  for (const Piece& piece : pieces) {
    EXPECT_TRUE(IsIntact(pool, piece));
    places.insert(piece.place);
  }
  EXPECT_EQ(places.size(), pieces.size());
}

TEST(BlockPoolTest, ReturnedPiecesAreReused) {
  BlockPool pool;
  std::vector<BlockPool::Place> places;
  for (int i = 0; i < 50000; ++i) places.push_back(pool.Take(30));
  const int64_t num_block_bytes = pool.num_block_bytes();
  EXPECT_EQ(pool.num_used_bytes(), 50000 * 32);
  EXPECT_EQ(pool.num_free_bytes(), 0);
  for (int round = 0; round < 10; ++round) {
    for (const BlockPool::Place place : places) pool.Return(place, 30);
    EXPECT_EQ(pool.num_used_bytes(), 0);
    EXPECT_EQ(pool.num_free_bytes(), 50000 * 32);
    // Sizes with the same padding share their pieces.
    for (BlockPool::Place& place : places) place = pool.Take(32);
    for (BlockPool::Place place : places) pool.Return(place, 32);
    for (BlockPool::Place& place : places) place = pool.Take(30);
    EXPECT_EQ(pool.num_free_bytes(), 0);
  }
  EXPECT_EQ(pool.num_block_bytes(), num_block_bytes);
}

TEST(BlockPoolTest, BlocksHaveLittleMoreMemoryThanTheirPieces) {
  BlockPool pool;
  for (int64_t i = 1; i <= 400000; ++i) {
    pool.Take(32);
    // A block has 64 KiB. In a pool of at least 2 MiB, a block has 2 MiB.
    const int64_t max_unused = i * 32 < (2 << 20) ? 1 << 16 : 2 << 20;
    ASSERT_LE(pool.num_block_bytes() - i * 32, max_unused);
  }
}

TEST(BlockPoolTest, TheEndOfABlockIsUsedForSmallerPieces) {
  BlockPool pool;
  // 65 pieces of 1000 bytes leave 536 bytes in a block of 64 KiB.
  for (int i = 0; i < 66; ++i) pool.Take(1000);
  const int64_t num_block_bytes = pool.num_block_bytes();
  EXPECT_EQ(pool.num_free_bytes(), 536);
  pool.Take(536);
  EXPECT_EQ(pool.num_free_bytes(), 0);
  EXPECT_EQ(pool.num_block_bytes(), num_block_bytes);
}

TEST(BlockPoolTest, TheMemoryOfALargePieceIsFreed) {
  BlockPool pool;
  const Piece small = TakeFilled(&pool, 8, 's');
  const int64_t num_block_bytes = pool.num_block_bytes();
  for (int i = 0; i < 3; ++i) {
    const Piece first = TakeFilled(&pool, BlockPool::kMaxSharedBytes + 1, 'a');
    const Piece second = TakeFilled(&pool, 3 << 20, 'b');
    EXPECT_EQ(pool.num_block_bytes(),
              num_block_bytes + BlockPool::kMaxSharedBytes + 1 + (3 << 20));
    EXPECT_TRUE(IsIntact(pool, first));
    EXPECT_TRUE(IsIntact(pool, second));
    pool.Return(first.place, first.num_bytes);
    pool.Return(second.place, second.num_bytes);
    EXPECT_EQ(pool.num_block_bytes(), num_block_bytes);
    EXPECT_EQ(pool.num_used_bytes(), 8);
  }
  EXPECT_TRUE(IsIntact(pool, small));
}

TEST(BlockPoolTest, AMovedPoolContainsThePieces) {
  BlockPool pool;
  const Piece piece = TakeFilled(&pool, 100, 'p');
  BlockPool moved = std::move(pool);
  EXPECT_TRUE(IsIntact(moved, piece));
  pool = BlockPool();
  const Piece other = TakeFilled(&pool, 100, 'o');
  EXPECT_TRUE(IsIntact(pool, other));
  EXPECT_TRUE(IsIntact(moved, piece));
}

}  // namespace
}  // namespace layoutmap
