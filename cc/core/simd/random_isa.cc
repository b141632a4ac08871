// Implementation of the random kernels. This file is compiled once per
// instruction set. It must not include standard library headers, for the reason
// that rows_isa.cc explains.
//
// Each lane of a register contains another value of the counter. All lanes
// compute the rounds of the generator together. TensorFlow's own loop processes
// one value of the counter at a time, and takes longer than writing the numbers
// to memory.

#include "cc/core/simd/random_kernels.h"
#include "cc/core/simd/vector.h"

namespace layoutmap {
namespace LM_ISA {
namespace {

typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint64_t Pairs __attribute__((vector_size(kLanes * 4)));

constexpr int kRounds = 10;
constexpr uint32_t kMultiplier[2] = {0xD2511F53, 0xCD9E8D57};
constexpr uint32_t kKeyStep[2] = {0x9E3779B9, 0xBB67AE85};
// Number of values that all lanes generate together.
constexpr int64_t kGroup = 4 * kLanes;

// Returns the 64-bit products of the even lanes.
inline Pairs MultiplyEven(Words a, Words b) {
#if defined(__AVX512F__)
  // The code uses the masked intrinsic, because GCC 12 warns about an undefined
  // operand in _mm512_mul_epu32.
  return reinterpret_cast<Pairs>(_mm512_maskz_mul_epu32(
      0xff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Pairs>(_mm256_mul_epu32(
      reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return reinterpret_cast<Pairs>(_mm_mul_epu32(reinterpret_cast<__m128i>(a),
                                               reinterpret_cast<__m128i>(b)));
#else
  Pairs product;
  for (int i = 0; i < kLanes / 2; ++i) {
    product[i] = static_cast<uint64_t>(a[2 * i]) * b[2 * i];
  }
  return product;
#endif
}

// Computes the high and the low words of the products of all lanes.
inline void Multiply(Words a, uint32_t b, Words* high, Words* low) {
  const Words factor = Words{} + b;
  const Pairs pairs = reinterpret_cast<Pairs>(a);
  const Pairs even = MultiplyEven(a, factor);
  const Pairs odd = MultiplyEven(reinterpret_cast<Words>(pairs >> 32), factor);
  constexpr uint64_t kLow = 0xffffffff;
  *high = reinterpret_cast<Words>((even >> 32) | (odd & ~kLow));
  *low = reinterpret_cast<Words>((even & kLow) | (odd << 32));
}

// Adds `count` to the counter.
inline void Skip(PhiloxState* state, uint32_t count) {
  uint64_t carry = count;
  for (uint32_t& word : state->counter) {
    carry += word;
    word = static_cast<uint32_t>(carry);
    carry >>= 32;
  }
}

// Computes the four words of the next `kLanes` values of the counter.
inline void Generate(const PhiloxState& state, Words words[4]) {
  Words lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  words[0] = state.counter[0] + lanes;
  // The lanes that carry are 0xffffffff, so a subtraction adds the carry.
  Words carry = reinterpret_cast<Words>(words[0] < lanes);
  for (int i = 1; i < 4; ++i) {
    words[i] = state.counter[i] - carry;
    carry &= reinterpret_cast<Words>(words[i] == 0);
  }
  uint32_t key[2] = {state.key[0], state.key[1]};
  for (int round = 0; round < kRounds; ++round) {
    Words high[2], low[2];
    Multiply(words[0], kMultiplier[0], &high[0], &low[0]);
    Multiply(words[2], kMultiplier[1], &high[1], &low[1]);
    words[0] = high[1] ^ words[1] ^ key[0];
    words[1] = low[1];
    words[2] = high[0] ^ words[3] ^ key[1];
    words[3] = low[0];
    key[0] += kKeyStep[0];
    key[1] += kKeyStep[1];
  }
}

// Interleaves the lanes of two vectors: a[0], b[0], a[1], b[1], and so on. GCC
// and clang support only different builtins for permuting lanes.
inline void Zip(Words a, Words b, Words* first, Words* second) {
#if defined(__clang__)
  constexpr int kHalf = kLanes / 2;
  for (int i = 0; i < kHalf; ++i) {
    (*first)[2 * i] = a[i];
    (*first)[2 * i + 1] = b[i];
    (*second)[2 * i] = a[kHalf + i];
    (*second)[2 * i + 1] = b[kHalf + i];
  }
#else
  Words low, high;
  for (int i = 0; i < kLanes / 2; ++i) {
    low[2 * i] = i;
    low[2 * i + 1] = kLanes + i;
  }
  high = low + kLanes / 2;
  *first = __builtin_shuffle(a, b, low);
  *second = __builtin_shuffle(a, b, high);
#endif
}

// Converts random words to floats in [0, 1), as TensorFlow does: the low bits
// of a word are the mantissa of a float in [1, 2), from which 1 is subtracted.
inline Vector ToUniform(Words words) {
  constexpr uint32_t kMantissa = 0x7fffff, kOne = 0x3f800000;
  return reinterpret_cast<Vector>((words & kMantissa) | kOne) - 1.0f;
}

// Writes the next `kGroup` numbers.
inline void Write(const PhiloxState& state, float factor, float offset,
                  float* data) {
  Words words[4], pairs[4], order[4];
  Generate(state, words);
  Zip(words[0], words[2], &pairs[0], &pairs[2]);
  Zip(words[1], words[3], &pairs[1], &pairs[3]);
  Zip(pairs[0], pairs[1], &order[0], &order[1]);
  Zip(pairs[2], pairs[3], &order[2], &order[3]);
  for (int i = 0; i < 4; ++i) {
    Store(data + i * kLanes, ToUniform(order[i]) * factor + offset);
  }
}

void FillUniform(PhiloxState state, float factor, float offset, int64_t size,
                 float* data) {
  int64_t done = 0;
  for (; done + kGroup <= size; done += kGroup) {
    Write(state, factor, offset, data + done);
    Skip(&state, kLanes);
  }
  if (done == size) return;
  float last[kGroup];
  Write(state, factor, offset, last);
  for (int64_t i = done; i < size; ++i) data[i] = last[i - done];
}

}  // namespace

extern const RandomKernels kRandomKernels;
const RandomKernels kRandomKernels = {FillUniform};

}  // namespace LM_ISA
}  // namespace layoutmap
