#include "cc/core/memory/huge_pages.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace layoutmap {
namespace {

TEST(HugePagesTest, AdviceKeepsValues) {
  constexpr size_t kPage = size_t{1} << 21;
  for (size_t size : {size_t{0}, size_t{1}, kPage, 3 * kPage + 5}) {
    std::vector<uint8_t> memory(size, 7);
    AdviseHugePages(memory.data(), memory.size());
    EXPECT_EQ(memory, std::vector<uint8_t>(size, 7));
    for (uint8_t& byte : memory) byte = 9;
    EXPECT_EQ(memory, std::vector<uint8_t>(size, 9));
  }
  AdviseHugePages(nullptr, 0);
}

TEST(HugePagesTest, MoveKeepsValues) {
  constexpr size_t kSize = (size_t{5} << 21) + 12345;
  std::vector<uint8_t> memory(kSize, 7);
  std::atomic<bool> stop{false};
  const MemoryRange range = {memory.data() + 1, memory.size() - 1};
  // Two calls must return the same result. The test does not check which
  // result, because the kernel may not support the move.
  const bool is_moved = MoveToHugePages(range, stop);
  EXPECT_EQ(MoveToHugePages(range, stop), is_moved);
  EXPECT_EQ(memory, std::vector<uint8_t>(kSize, 7));
  EXPECT_TRUE(MoveToHugePages({memory.data(), 100}, stop));
  EXPECT_TRUE(MoveToHugePages({nullptr, 0}, stop));
  stop = true;
  EXPECT_FALSE(MoveToHugePages(range, stop));
}

TEST(HugePagesTest, MoveDuringWritesKeepsValues) {
  std::vector<uint8_t> memory(size_t{8} << 21, 1);
  std::atomic<bool> stop{false};
  std::thread mover(
      [&] { MoveToHugePages({memory.data(), memory.size()}, stop); });
  for (uint8_t& byte : memory) ++byte;
  mover.join();
  EXPECT_EQ(memory, std::vector<uint8_t>(memory.size(), 2));
}

}  // namespace
}  // namespace layoutmap
