#include "cc/core/simd/random_kernels.h"

#include <cstdint>
#include <cstring>
#include <vector>

#include "cc/core/simd/all_kernels_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

// Returns the four words of Philox 4x32-10 (Salmon et al., 2011) for one value
// of the counter.
std::vector<uint32_t> Words(PhiloxState state) {
  uint32_t* const c = state.counter;
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xD2511F53} * c[0];
    const uint64_t second = uint64_t{0xCD9E8D57} * c[2];
    const uint32_t next[] = {
        static_cast<uint32_t>(second >> 32) ^ c[1] ^ state.key[0],
        static_cast<uint32_t>(second),
        static_cast<uint32_t>(first >> 32) ^ c[3] ^ state.key[1],
        static_cast<uint32_t>(first)};
    std::memcpy(c, next, sizeof(next));
    state.key[0] += 0x9E3779B9;
    state.key[1] += 0xBB67AE85;
  }
  return {c[0], c[1], c[2], c[3]};
}

std::vector<float> Expected(PhiloxState state, float factor, float offset,
                            int64_t size) {
  std::vector<float> numbers;
  while (static_cast<int64_t>(numbers.size()) < size) {
    for (uint32_t word : Words(state)) {
      const uint32_t bits = (word & 0x7fffff) | 0x3f800000;
      float number;
      std::memcpy(&number, &bits, sizeof(number));
      const float scaled = (number - 1.0f) * factor;
      numbers.push_back(scaled + offset);
    }
    for (uint32_t& word : state.counter) {
      if (++word != 0) break;
    }
  }
  numbers.resize(size);
  return numbers;
}

TEST(RandomKernels, ReferenceMatchesThePublishedVectors) {
  EXPECT_EQ(
      Words({{0, 0, 0, 0}, {0, 0}}),
      (std::vector<uint32_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(
      Words({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
             {0xa4093822, 0x299f31d0}}),
      (std::vector<uint32_t>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(RandomKernels, AllInstructionSetsReturnTheSameNumbers) {
  for (const NamedKernels& kernels : AllKernels()) {
    for (int64_t size : {0, 1, 3, 4, 15, 16, 63, 64, 65, 200, 1000}) {
      std::vector<float> numbers(size + 1, -1.0f);
      const PhiloxState state = {{7, 8, 9, 10}, {0x12345678, 0x9abcdef0}};
      kernels.random.fill_uniform(state, 0.3f, -0.1f, size, numbers.data());
      EXPECT_EQ(numbers.back(), -1.0f) << "Wrote too many of " << size;
      numbers.pop_back();
      EXPECT_EQ(numbers, Expected(state, 0.3f, -0.1f, size));
    }
  }
}

TEST(RandomKernels, CountersCarryIntoAllWords) {
  constexpr uint32_t kMost = 0xffffffff;
  const PhiloxState states[] = {{{kMost - 5, 1, 2, 3}, {4, 5}},
                                {{kMost - 20, kMost, 2, 3}, {4, 5}},
                                {{kMost, kMost, kMost, 3}, {4, 5}},
                                {{kMost - 1, kMost, kMost, kMost}, {4, 5}}};
  for (const NamedKernels& kernels : AllKernels()) {
    for (const PhiloxState& state : states) {
      std::vector<float> numbers(333);
      kernels.random.fill_uniform(state, 1.0f, 0.0f, 333, numbers.data());
      EXPECT_EQ(numbers, Expected(state, 1.0f, 0.0f, 333));
    }
  }
}

}  // namespace
}  // namespace layoutmap
