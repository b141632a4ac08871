#include "cc/core/rows/changed_rows.h"

#include <cstdint>
#include <string>
#include <vector>

#include "cc/core/base/status.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

using Rows = std::vector<std::vector<int64_t>>;

TEST(ChangedRowsTest, TakeReturnsRowsOnceAndAscending) {
  ChangedRows changed({200, 1, 0});
  const std::vector<int64_t> unwatched = {5};
  changed.Note(0, unwatched);
  const int64_t watch = changed.Watch();
  const std::vector<int64_t> some = {199, -1, 63, 64, 63};
  const std::vector<uint32_t> others = {0, 64};
  changed.Note(0, some);
  changed.Note(0, others);
  changed.Note(1, std::vector<uint32_t>{0});
  Rows found;
  ASSERT_TRUE(changed.Take(watch, {{7, 63}, {}, {}}, &found).ok());
  EXPECT_EQ(found, (Rows{{0, 7, 63, 64, 199}, {0}, {}}));
  ASSERT_TRUE(changed.Take(watch, {{}, {}, {}}, &found).ok());
  EXPECT_EQ(found, (Rows{{}, {}, {}}));
}

TEST(ChangedRowsTest, AFailedTakeClearsNothing) {
  ChangedRows changed({100});
  Rows found;
  EXPECT_FALSE(changed.Take(0, {{}}, &found).ok());
  const int64_t watch = changed.Watch();
  changed.Note(0, std::vector<int64_t>{42});
  EXPECT_FALSE(changed.Take(watch, {{100}}, &found).ok());
  EXPECT_FALSE(changed.Take(watch, {{-1}}, &found).ok());
  EXPECT_FALSE(changed.Take(watch, {}, &found).ok());
  EXPECT_FALSE(changed.Take(watch - 1, {{}}, &found).ok());
  ASSERT_TRUE(changed.Take(watch, {{}}, &found).ok());
  EXPECT_EQ(found, (Rows{{42}}));
}

TEST(ChangedRowsTest, ANewWatchStartsWithoutChangedRows) {
  ChangedRows changed({100});
  const int64_t first = changed.Watch();
  changed.Note(0, std::vector<int64_t>{42});
  const int64_t second = changed.Watch();
  Rows found;
  EXPECT_NE(changed.Take(first, {{}}, &found).message().find("later watch"),
            std::string::npos);
  ASSERT_TRUE(changed.Take(second, {{}}, &found).ok());
  EXPECT_EQ(found, (Rows{{}}));
}

}  // namespace
}  // namespace layoutmap
