#include "cc/core/collectives/reduction.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/parallel_for_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

constexpr FinalOp kIdentity = FinalOp::kIdentity;

template <typename T>
std::vector<T> ReduceAll(const Reduction& reduction,
                         const std::vector<std::vector<T>>& inputs,
                         int64_t chunk,
                         const ParallelFor& parallel_for = SerialFor) {
  EXPECT_EQ(BytesPerElement(reduction.type), sizeof(T));
  std::vector<const void*> pointers;
  for (const auto& input : inputs) pointers.push_back(input.data());
  std::vector<T> output(inputs[0].size());
  Reduce(reduction, pointers, static_cast<int64_t>(output.size()), chunk,
         parallel_for, output.data());
  return output;
}

TEST(Reduce, MergesIntegers) {
  const std::vector<std::vector<int32_t>> inputs = {
      {1, -2, 3}, {10, 20, -30}, {4, 5, 6}};
  const ElementType type = ElementType::kInt32;
  EXPECT_EQ(ReduceAll<int32_t>({type, MergeOp::kAdd, kIdentity}, inputs, 1),
            (std::vector<int32_t>{15, 23, -21}));
  EXPECT_EQ(ReduceAll<int32_t>({type, MergeOp::kMul, kIdentity}, inputs, 1),
            (std::vector<int32_t>{40, -200, -540}));
  EXPECT_EQ(ReduceAll<int32_t>({type, MergeOp::kMax, kIdentity}, inputs, 1),
            (std::vector<int32_t>{10, 20, 6}));
  EXPECT_EQ(ReduceAll<int32_t>({type, MergeOp::kMin, kIdentity}, inputs, 1),
            (std::vector<int32_t>{1, -2, -30}));
  // The quotients are rounded towards 0.
  EXPECT_EQ(
      ReduceAll<int32_t>({type, MergeOp::kAdd, FinalOp::kDivide}, inputs, 1),
      (std::vector<int32_t>{5, 7, -7}));
}

TEST(Reduce, IntegersWrapAround) {
  const int64_t max = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(ReduceAll<int64_t>({ElementType::kInt64, MergeOp::kAdd, kIdentity},
                               {{max}, {1}}, 1),
            (std::vector<int64_t>{std::numeric_limits<int64_t>::min()}));
  EXPECT_EQ(ReduceAll<int64_t>({ElementType::kInt64, MergeOp::kMul, kIdentity},
                               {{max}, {2}}, 1),
            (std::vector<int64_t>{-2}));
}

// The sum of 1, 2^-24 and 2^-24 depends on the order.
TEST(Reduce, EachChunkStartsWithItsDevice) {
  const float tiny = std::ldexp(1.0f, -24);
  const float sum = 1.0f + 2 * tiny;
  const std::vector<std::vector<float>> inputs = {{1, 1, 1, 1, 1},
                                                  std::vector<float>(5, tiny),
                                                  std::vector<float>(5, tiny)};
  const Reduction reduction = {ElementType::kFloat, MergeOp::kAdd, kIdentity};
  // The chunks have 2, 2 and 1 elements, and start with the devices 0, 1 and 2:
  // (1 + tiny) + tiny, (tiny + tiny) + 1, (tiny + 1) + tiny.
  EXPECT_EQ(ReduceAll<float>(reduction, inputs, 2),
            (std::vector<float>{1, 1, sum, sum, 1}));
  EXPECT_EQ(ReduceAll<float>(reduction, inputs, 4),
            (std::vector<float>{1, 1, 1, 1, sum}));
}

TEST(Reduce, NanIsPropagated) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::vector<float>> inputs = {{nan, 1}, {1, nan}};
  for (MergeOp merge :
       {MergeOp::kAdd, MergeOp::kMul, MergeOp::kMax, MergeOp::kMin}) {
    for (float value :
         ReduceAll<float>({ElementType::kFloat, merge, kIdentity}, inputs, 1)) {
      EXPECT_TRUE(std::isnan(value));
    }
  }
}

// The output may be one of the inputs.
TEST(Reduce, InPlace) {
  for (int64_t size : {1, 511, 512, 513, 3000}) {
    std::vector<double> first(size), second(size);
    for (int64_t i = 0; i < size; ++i) {
      first[i] = static_cast<double>(i);
      second[i] = static_cast<double>(1000 * i);
    }
    const std::vector<const void*> inputs = {first.data(), second.data()};
    Reduce({ElementType::kDouble, MergeOp::kAdd, kIdentity}, inputs, size,
           (size + 1) / 2, SerialFor, second.data());
    for (int64_t i = 0; i < size; ++i) EXPECT_EQ(second[i], 1001.0 * i);
  }
}

TEST(Reduce, NumberOfThreadsDoesNotChangeResults) {
  const int64_t size = 100'003;
  std::vector<std::vector<float>> inputs(4, std::vector<float>(size));
  for (int64_t i = 0; i < size; ++i) {
    for (int64_t r = 0; r < 4; ++r) {
      inputs[r][i] = std::sin(static_cast<float>(4 * i + r));
    }
  }
  const Reduction reduction = {ElementType::kFloat, MergeOp::kAdd,
                               FinalOp::kDivide};
  const auto expected = ReduceAll<float>(reduction, inputs, 25'008);
  EXPECT_EQ(ReduceAll<float>(reduction, inputs, 25'008, UnevenFor(3)),
            expected);
}

TEST(Reduce, EmptyInputs) {
  EXPECT_TRUE(ReduceAll<float>({ElementType::kFloat, MergeOp::kAdd, kIdentity},
                               {{}, {}}, 0)
                  .empty());
}

// All values of both types are sums of themselves and zero. The sign of zero
// and the payloads of NaN are not kept.
TEST(Reduce, SixteenBitValuesAreExact) {
  for (ElementType type : {ElementType::kHalf, ElementType::kBfloat16}) {
    const uint16_t infinity = type == ElementType::kHalf ? 0x7c00 : 0x7f80;
    std::vector<uint16_t> values(1 << 16);
    for (int i = 0; i < 1 << 16; ++i) values[i] = static_cast<uint16_t>(i);
    const std::vector<uint16_t> zeros(1 << 16, 0);
    const auto sums = ReduceAll<uint16_t>({type, MergeOp::kAdd, kIdentity},
                                          {values, zeros}, 1 << 15);
    for (int i = 0; i < 1 << 16; ++i) {
      const int magnitude = i & 0x7fff;
      if (magnitude > infinity) {
        EXPECT_GT(sums[i] & 0x7fff, infinity) << i;
      } else {
        EXPECT_EQ(sums[i], magnitude == 0 ? 0 : i) << i;
      }
    }
  }
}

// The sums of 1 and of half of its last bit are ties, which are rounded to even
// after each operation.
TEST(Reduce, SixteenBitValuesAreRoundedAfterEachOperation) {
  struct Case {
    ElementType type;
    uint16_t one, half_of_last_bit, one_and_a_half_bits, next, after_next;
  };
  for (const Case& c :
       {Case{ElementType::kHalf, 0x3c00, 0x1000, 0x1600, 0x3c01, 0x3c02},
        Case{ElementType::kBfloat16, 0x3f80, 0x3b80, 0x3c40, 0x3f81, 0x3f82}}) {
    const Reduction reduction = {c.type, MergeOp::kAdd, kIdentity};
    EXPECT_EQ(ReduceAll<uint16_t>(
                  reduction,
                  {{c.one}, {c.half_of_last_bit}, {c.half_of_last_bit}}, 1)[0],
              c.one);
    EXPECT_EQ(ReduceAll<uint16_t>(reduction, {{c.one}, {c.one_and_a_half_bits}},
                                  1)[0],
              c.after_next);
    // The quotient of 2 * next / 2.
    EXPECT_EQ(ReduceAll<uint16_t>({c.type, MergeOp::kAdd, FinalOp::kDivide},
                                  {{c.next}, {c.next}}, 1)[0],
              c.next);
  }
}

TEST(Reduce, HalfOverflowsToInfinity) {
  const uint16_t max = 0x7bff, infinity = 0x7c00;
  EXPECT_EQ(ReduceAll<uint16_t>({ElementType::kHalf, MergeOp::kAdd, kIdentity},
                                {{max, 0xfbff}, {max, 0xfbff}}, 1),
            (std::vector<uint16_t>{infinity, infinity | 0x8000}));
}

}  // namespace
}  // namespace layoutmap
