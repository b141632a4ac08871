#include "cc/core/base/all_finite.h"

#include <limits>
#include <vector>

#include "cc/core/base/parallel_for_test.h"
#include "cc/core/base/views.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

TEST(AllFinite, Empty) {
  EXPECT_TRUE(AllFinite({}, SerialFor));
  EXPECT_TRUE(AllFinite({Span<const float>()}, SerialFor));
}

TEST(AllFinite, FindsAValueAtEachPosition) {
  const float max = std::numeric_limits<float>::max();
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> first(9000, max), second(5, -max);
  second[0] = std::numeric_limits<float>::denorm_min();
  const std::vector<Span<const float>> arrays = {first, second};
  EXPECT_TRUE(AllFinite(arrays, SerialFor));
  for (float bad : {infinity, -infinity, nan, -nan}) {
    for (int i : {0, 1, 4095, 4096, 8191, 8999}) {
      first[i] = bad;
      EXPECT_FALSE(AllFinite(arrays, SerialFor)) << bad << " at " << i;
      EXPECT_FALSE(AllFinite(arrays, UnevenFor(3))) << bad << " at " << i;
      first[i] = max;
    }
    second[4] = bad;
    EXPECT_FALSE(AllFinite(arrays, SerialFor)) << bad;
    second[4] = 0.0f;
  }
  EXPECT_TRUE(AllFinite(arrays, SerialFor));
}

}  // namespace
}  // namespace layoutmap
