#include "cc/core/base/huge_pages.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace layoutmap {
namespace {

TEST(HugePagesTest, AHintLeavesMemoryAsItIs) {
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

}  // namespace
}  // namespace layoutmap
