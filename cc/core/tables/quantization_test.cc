#include "cc/core/tables/quantization.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/tables/lookup.h"
#include "cc/core/tables/table_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float ReferenceQuantize(const Quantization& q, float x) {
  if (std::isnan(x)) return x;
  const float clipped = x < q.lower ? q.lower : x > q.upper ? q.upper : x;
  return std::floor((clipped - q.lower) / q.quantum + 0.5f) * q.quantum +
         q.lower;
}

TEST(QuantizationTest, EveryLevelQuantizesBeforeItSums) {
  Quantization q;
  ASSERT_TRUE(MakeQuantization(-0.5f, 0.75f, 17, "t", &q).ok());
  // The values of `dim` test full registers of every width and remaining
  // columns.
  for (int64_t dim : {1, 3, 16, 67, 130}) {
    TestTable table(MakePartition(Placement::kDiv, EvenOffsets(5, 2)), dim, 3);
    table.row(4)[0] = kInfinity;
    table.row(3)[dim - 1] = -kInfinity;
    const std::vector<uint32_t> rows = {4, 3, 0, 3};
    const std::vector<int64_t> splits = {0, 1, 1, 4};
    for (const std::vector<float>& gains :
         {std::vector<float>(), std::vector<float>{0.5f, 2, 3, 0.25f}}) {
      std::vector<float> expected(3 * dim);
      for (int64_t o = 0; o < 3; ++o) {
        for (int64_t c = 0; c < dim; ++c) {
          float sum = 0;
          for (int64_t i = splits[o]; i < splits[o + 1]; ++i) {
            const float value = ReferenceQuantize(q, table.row(rows[i])[c]);
            sum += gains.empty() ? value : gains[i] * value;
          }
          expected[o * dim + c] = sum;
        }
      }
      for (CpuLevel level : LevelsOfThisCpu()) {
        std::vector<float> out(3 * dim, -7.0f);
        Lookup(table.View(), rows, splits, gains, RowKernelsFor(level),
               SerialFor, {out.data(), 3, dim}, &q);
        EXPECT_EQ(std::memcmp(out.data(), expected.data(),
                              out.size() * sizeof(float)),
                  0)
            << dim << " " << CpuLevelName(level);
      }
    }
  }
}

TEST(QuantizationTest, NanStaysNan) {
  Quantization q;
  ASSERT_TRUE(MakeQuantization(0, 1, 2, "t", &q).ok());
  for (CpuLevel level : LevelsOfThisCpu()) {
    TestTable table(MakePartition(Placement::kDiv, EvenOffsets(1, 1)), 21, 3);
    table.row(0)[0] = table.row(0)[20] = std::nanf("");
    std::vector<float> out(21);
    Lookup(table.View(), std::vector<uint32_t>{0}, std::vector<int64_t>{0, 1},
           {}, RowKernelsFor(level), SerialFor, {out.data(), 1, 21}, &q);
    EXPECT_TRUE(std::isnan(out[0]));
    EXPECT_TRUE(std::isnan(out[20]));
    EXPECT_FALSE(std::isnan(out[1]));
  }
}

TEST(QuantizationTest, BothLimitsAreQuantizedValues) {
  Quantization q;
  ASSERT_TRUE(MakeQuantization(-1, 1, 3, "t", &q).ok());
  EXPECT_EQ(ReferenceQuantize(q, -9), -1);
  EXPECT_EQ(ReferenceQuantize(q, -0.2f), 0);
  EXPECT_EQ(ReferenceQuantize(q, 9), 1);
}

TEST(QuantizationTest, InvalidLimitsAreRejectedWithTheTableName) {
  Quantization q;
  const auto error_message = [&](float lower, float upper,
                                 int64_t num_buckets) {
    const Status status = MakeQuantization(lower, upper, num_buckets, "t", &q);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_NE(error_message(0, 1, 1).find("num_buckets"), std::string::npos);
  EXPECT_NE(error_message(0, 1, int64_t{1} << 24).find("Table 't'"),
            std::string::npos);
  for (float lower : {1.0f, 2.0f, std::nanf(""), -kInfinity}) {
    EXPECT_NE(error_message(lower, 1, 2).find("limits"), std::string::npos);
  }
  // With these limits, the distance between two values is a subnormal float.
  EXPECT_NE(error_message(0, 1e-37f, 256).find("limits"), std::string::npos);
  EXPECT_TRUE(MakeQuantization(0, 4e-36f, 256, "t", &q).ok());
}

}  // namespace
}  // namespace layoutmap
