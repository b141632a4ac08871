#include "cc/core/engine/marks.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "cc/core/base/status.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

using Values = std::vector<float>;

double Norm(const Mark& mark) {
  double square = 0;
  for (const float one : mark) square += static_cast<double>(one) * one;
  return std::sqrt(square);
}

Values Apply(const Mark& mark, const std::function<float(float)>& function) {
  Values values;
  for (const float one : mark) values.push_back(function(one));
  return values;
}

// Reads the factors, and expects success.
std::map<int64_t, float> Read(const std::vector<IssuedMark>& issued,
                              const Values& sum) {
  std::vector<MarkFactor> factors;
  const Status status = ReadMarks(issued, sum, "", &factors);
  EXPECT_TRUE(status.ok()) << status.message();
  std::map<int64_t, float> found;
  for (const MarkFactor& one : factors) found[one.number] = one.factor;
  return found;
}

Status TryRead(const std::vector<IssuedMark>& issued, const Values& sum) {
  std::vector<MarkFactor> factors;
  return ReadMarks(issued, sum, "", &factors);
}

Mark MarkOf(int64_t number, float norm) {
  return IssueMark(std::vector<int64_t>{number}, Values{norm});
}

TEST(MarksTest, TheNormOfAMarkIsTheNormOfTheGradient) {
  for (const float norm : {1e-12f, 0.37f, 1.0f, 2.0f, 3e7f, 1e37f}) {
    for (const int64_t number : {0, 63, 64, 12345}) {
      EXPECT_NEAR(Norm(MarkOf(number, norm)) / norm, 1, 1e-7);
    }
  }
  EXPECT_LT(Norm(MarkOf(3, 0.0f)), 1e-18);
}

TEST(MarksTest, InnerProductsAreThoseOfTheGradients) {
  const Mark one = MarkOf(5, 2.0f);
  const Mark other = IssueMark(std::vector<int64_t>{5, 9}, Values{-1.5f, 0.5f});
  double product = 0;
  for (int64_t i = 0; i < kMarkSize; ++i) {
    product += static_cast<double>(one[i]) * other[i];
  }
  EXPECT_NEAR(product, 2 * -1.5, 1e-4);
  EXPECT_NEAR(Norm(other), std::hypot(1.5, 0.5), 1e-6);
  // A projection of the second gradient, and a sum.
  for (const float factor : {0.75f, -3.25f, 1.0f}) {
    Values sum;
    for (int64_t i = 0; i < kMarkSize; ++i) {
      sum.push_back(other[i] + factor * one[i]);
    }
    const auto found = Read({{5, &one}, {9, &other}}, sum);
    EXPECT_EQ(found, (std::map<int64_t, float>{{5, factor}, {9, 1.0f}}));
  }
}

TEST(MarksTest, FactorsAreExact) {
  for (const float norm : {0.0f, 1e-9f, 0.7f, 1.0f, 5e6f}) {
    const Mark mark = MarkOf(70, norm);
    for (const float factor :
         {1.0f, -1.0f, 0.1f, 1.0f / 3, 1e-6f, 32768.0f, 1.0f / 32768, 1.7e4f}) {
      const Values scaled = Apply(mark, [&](float v) { return v * factor; });
      EXPECT_EQ(Read({{70, &mark}}, scaled),
                (std::map<int64_t, float>{{70, factor}}));
      const Values divided = Apply(mark, [&](float v) { return v / factor; });
      EXPECT_EQ(Read({{70, &mark}}, divided),
                (std::map<int64_t, float>{{70, 1.0f / factor}}));
    }
  }
}

TEST(MarksTest, MultiplicationsByZeroAreRecognized) {
  const Mark mark = MarkOf(3, 1.0f), other = MarkOf(4, 2.0f);
  const std::vector<IssuedMark> issued = {{3, &mark}, {4, &other}};
  for (const float zero : {0.0f, -0.0f}) {
    const Values zeros = Apply(mark, [&](float v) { return v * zero; });
    EXPECT_EQ(Read(issued, zeros), (std::map<int64_t, float>{{3, 0.0f}}));
    Values sum;
    for (int64_t i = 0; i < kMarkSize; ++i) {
      sum.push_back(mark[i] * 0.0f + other[i]);
    }
    EXPECT_EQ(Read(issued, sum),
              (std::map<int64_t, float>{{3, 0.0f}, {4, 1.0f}}));
  }
  EXPECT_TRUE(Read(issued, Values(kMarkSize)).empty());
  EXPECT_TRUE(Read(issued, Values(kMarkSize, -0.0f)).empty());
}

float RoundedTo(float value, int bits) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof(word));
  word = (word + (uint32_t{1} << (22 - bits))) &
         ~((uint32_t{1} << (23 - bits)) - 1);
  std::memcpy(&value, &word, sizeof(word));
  return value;
}

const std::map<std::string, std::function<float(float)>>& OtherOperations() {
  static const auto* const operations =
      new std::map<std::string, std::function<float(float)>>{
          {"sign", [](float v) { return (v > 0) - (v < 0); }},
          {"clip_by_value",
           [](float v) { return std::fmin(std::fmax(v, -1e-3f), 1e-3f); }},
          {"clip_above", [](float v) { return std::fmin(v, 0.999f); }},
          {"relu", [](float v) { return std::fmax(v, 0.0f); }},
          {"abs", [](float v) { return std::fabs(v); }},
          {"square", [](float v) { return v * v; }},
          {"tanh", [](float v) { return std::tanh(v); }},
          {"float16", [](float v) { return RoundedTo(v, 10); }},
          {"bfloat16", [](float v) { return RoundedTo(v, 7); }},
          {"add", [](float v) { return v + 1e-5f; }},
          {"threshold",
           [](float v) { return std::fabs(v) < 1e-5f ? 0.0f : v; }},
          {"rms", [](float v) { return v / (std::fabs(v) + 1e-3f); }},
          {"ones", [](float) { return 1.0f; }},
  };
  return *operations;
}

TEST(MarksTest, OtherOperationsAreRejected) {
  for (const int64_t number : {0, 1, 700, 999999}) {
    const Mark mark = MarkOf(number, 1.0f);
    for (const auto& [name, function] : OtherOperations()) {
      const Status status = TryRead({{number, &mark}}, Apply(mark, function));
      EXPECT_EQ(status.code(), Code::kInvalidArgument) << name;
      EXPECT_NE(status.message().find("clip_by_norm"), std::string::npos);
    }
    // Each element is checked.
    for (int64_t i = 0; i < kMarkSize; ++i) {
      for (const float factor : {0.0f, 0.5f, 1.001f}) {
        Values values(mark.begin(), mark.end());
        values[i] *= factor;
        if (mark[i] == 0) values[i] = 1e-6f;
        EXPECT_FALSE(TryRead({{number, &mark}}, values).ok()) << i;
      }
    }
    // Every row and every column is scaled by its norm.
    for (const bool by_row : {false, true}) {
      Values values(mark.begin(), mark.end());
      std::map<int64_t, double> squares;
      const auto key = [&](int64_t i) {
        return by_row ? i / kMarkColumns : i % kMarkColumns;
      };
      for (int64_t i = 0; i < kMarkSize; ++i) {
        squares[key(i)] += static_cast<double>(mark[i]) * mark[i];
      }
      for (int64_t i = 0; i < kMarkSize; ++i) {
        const double norm = std::sqrt(squares[key(i)]);
        if (norm > 0) values[i] /= static_cast<float>(norm);
      }
      EXPECT_FALSE(TryRead({{number, &mark}}, values).ok());
    }
  }
}

TEST(MarksTest, OtherGradientsAreNotFound) {
  const Mark mark = MarkOf(3, 1.0f), later = MarkOf(67, 1.0f);
  const Values values(mark.begin(), mark.end());
  for (const std::vector<IssuedMark>& issued :
       {std::vector<IssuedMark>{}, {{67, &later}}}) {
    const Status status = TryRead(issued, values);
    EXPECT_EQ(status.code(), Code::kFailedPrecondition);
    EXPECT_NE(status.message().find("have expired"), std::string::npos);
  }
}

TEST(MarksTest, ValuesThatAreNotFinitePass) {
  const float kNan = std::numeric_limits<float>::quiet_NaN();
  // The gradient is not finite.
  for (const float norm : {kNan, std::numeric_limits<float>::infinity()}) {
    const Mark mark = MarkOf(3, norm);
    EXPECT_FALSE(std::isfinite(Norm(mark)));
    EXPECT_EQ(Read({{3, &mark}}, Apply(mark, [](float v) { return v / 2; })),
              (std::map<int64_t, float>{{3, 0.5f}}));
    // A program that replaces only some values is rejected.
    EXPECT_FALSE(
        TryRead(
            {{3, &mark}},
            Apply(mark, [](float v) { return std::isfinite(v) ? v : 1.0f; }))
            .ok() &&
        std::isfinite(norm));
  }
  // The factor is not finite.
  const Mark mark = MarkOf(3, 1.0f);
  const auto found =
      Read({{3, &mark}}, Apply(mark, [&](float v) { return v * kNan; }));
  EXPECT_TRUE(std::isnan(found.at(3)));
}

}  // namespace
}  // namespace layoutmap
