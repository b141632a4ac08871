// Tests the code for systems without huge pages. This file compiles the source
// a second time, in another namespace, as a system other than Linux would.

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

#undef __linux__
#undef MADV_HUGEPAGE
#define layoutmap layoutmap_portable
#include "cc/core/memory/huge_pages.cc"

namespace layoutmap_portable {
namespace {

TEST(HugePagesPortableTest, AdviceKeepsValuesAndNothingIsMoved) {
  std::vector<uint8_t> memory(3 * kPage, 7);
  AdviseHugePages(memory.data(), memory.size());
  AdviseHugePages(nullptr, 0);
  const std::atomic<bool> stop{false};
  EXPECT_FALSE(MoveToHugePages({memory.data(), memory.size()}, stop));
  EXPECT_EQ(memory, std::vector<uint8_t>(3 * kPage, 7));
}

}  // namespace
}  // namespace layoutmap_portable
