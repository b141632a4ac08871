#include "cc/core/base/catch_all.h"

#include <cstddef>
#include <limits>
#include <new>
#include <stdexcept>
#include <vector>

#include "cc/core/base/status.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

TEST(CatchAllTest, ReturnedStatusIsPassedOn) {
  EXPECT_TRUE(CatchAll([] { return Status(); }).ok());
  const Status status = CatchAll([] { return NotYet("for a row"); });
  EXPECT_EQ(status.code(), Code::kNotYet);
  EXPECT_EQ(status.message(), "for a row");
}

TEST(CatchAllTest, AllocationAndLengthErrorsAreOutOfMemory) {
  const Status bad_alloc = CatchAll([]() -> Status { throw std::bad_alloc(); });
  EXPECT_EQ(bad_alloc.code(), Code::kOutOfMemory);
  const Status length_error = CatchAll([] {
    // The compiler warns about an allocation with a constant size that is too
    // large, so the size is volatile.
    volatile size_t size = std::numeric_limits<size_t>::max();
    std::vector<float> values;
    values.reserve(size);
    return Status();
  });
  EXPECT_EQ(length_error.code(), Code::kOutOfMemory);
  EXPECT_EQ(length_error.message().find("Out of memory ("), 0u);
}

TEST(CatchAllTest, OtherExceptionsAreInternalErrorsWithTheirText) {
  const Status runtime_error =
      CatchAll([]() -> Status { throw std::runtime_error("no such thread"); });
  EXPECT_EQ(runtime_error.code(), Code::kInternal);
  EXPECT_EQ(runtime_error.message(), "Internal error: no such thread");
  const Status number = CatchAll([]() -> Status { throw 7; });
  EXPECT_EQ(number.code(), Code::kInternal);
}

}  // namespace
}  // namespace layoutmap
