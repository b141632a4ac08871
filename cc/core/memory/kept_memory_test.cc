#include "cc/core/memory/kept_memory.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "cc/core/memory/raw_array.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

TEST(KeptMemoryTest, EveryByteCanBeWritten) {
  for (size_t size = 1; size < (size_t{1} << 27); size = size * 3 / 2 + 1) {
    for (int times = 0; times < 2; ++times) {
      auto* const memory = static_cast<uint8_t*>(TakeMemory(size));
      std::memset(memory, 7, size);
      EXPECT_EQ(memory[size - 1], 7);
      ReturnMemory(memory, size);
    }
  }
}

TEST(KeptMemoryTest, ReturningNullIsANoOp) { ReturnMemory(nullptr, 1 << 20); }

TEST(KeptMemoryTest, NoBlockIsInUseTwice) {
  // The total size exceeds the limit of the pool, so that the pool also frees
  // blocks.
  std::vector<std::thread> threads;
  for (uint8_t t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      std::mt19937 random(t);
      std::vector<std::pair<uint8_t*, size_t>> held;
      for (int i = 0; i < 400; ++i) {
        if (held.size() < 8) {
          const size_t size = size_t{1} << (12 + random() % 13);
          auto* const memory = static_cast<uint8_t*>(TakeMemory(size));
          memory[0] = t;
          memory[size - 1] = t;
          held.emplace_back(memory, size);
          continue;
        }
        const size_t which = random() % held.size();
        const auto [memory, size] = held[which];
        EXPECT_EQ(memory[0], t);
        EXPECT_EQ(memory[size - 1], t);
        ReturnMemory(memory, size);
        held.erase(held.begin() + static_cast<ptrdiff_t>(which));
      }
      for (const auto& [memory, size] : held) ReturnMemory(memory, size);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(RawArrayTest, MovedFromArrayIsEmpty) {
  RawArray<int64_t> array(100000);
  int64_t* const data = array.data();
  data[99999] = 5;
  RawArray<int64_t> other(std::move(array));
  EXPECT_EQ(other.data(), data);
  EXPECT_EQ(other[99999], 5);
  EXPECT_EQ(array.size(), 0);  // NOLINT: tests the moved-from state
  EXPECT_EQ(array.data(), nullptr);
  array = std::move(other);
  EXPECT_EQ(array.size(), 100000);
  EXPECT_EQ(other.size(), 0);  // NOLINT
  array = RawArray<int64_t>();
  EXPECT_EQ(array.size(), 0);
  EXPECT_EQ(RawArray<int64_t>(0).size(), 0);
}

}  // namespace
}  // namespace layoutmap
