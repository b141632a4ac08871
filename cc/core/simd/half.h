// Functions that convert 16-bit values to floats, and functions that round
// floats stochastically to 16-bit values. Include this file only from files
// that are compiled once per instruction set.
//
// All operations use integer arithmetic or exact float arithmetic. TensorFlow's
// threads use a mode that treats subnormal floats as 0. The results must be
// bitwise identical with and without this mode.

#ifndef TF_LAYOUTMAP_CORE_SIMD_HALF_H_
#define TF_LAYOUTMAP_CORE_SIMD_HALF_H_

#include <cstdint>

#include "cc/core/simd/vector.h"

namespace layoutmap {
namespace LM_ISA {

typedef uint16_t Halves
    __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

// Each operation has two overloads: one for a register and one for a single
// value. The overloads in vector.h follow the same rule.
static inline void ReadHalf(const uint16_t* p, uint32_t* x) { *x = *p; }
static inline void ReadHalf(const uint16_t* p, Words* x) {
  *x = __builtin_convertvector(*reinterpret_cast<const Halves*>(p), Words);
}
static inline void WriteHalf(uint16_t* p, uint32_t x) {
  *p = static_cast<uint16_t>(x);
}
static inline void WriteHalf(uint16_t* p, Words x) {
  *reinterpret_cast<Halves*>(p) = __builtin_convertvector(x, Halves);
}
static inline uint32_t BitsOf(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}
static inline Words BitsOf(Vector x) { return (Words)x; }
static inline float FromBits(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}
static inline Vector FromBits(Words bits) { return (Vector)bits; }
// These functions convert integers in [0, 2^31) to floats, and floats to
// integers. The conversion to integers rounds towards 0.
static inline float ToFloat(uint32_t x) {
  return static_cast<float>(static_cast<int32_t>(x));
}
static inline Vector ToFloat(Words x) {
  return __builtin_convertvector((Ints)x, Vector);
}
static inline uint32_t ToInteger(float x) {
  return static_cast<uint32_t>(static_cast<int32_t>(x));
}
static inline Words ToInteger(Vector x) {
  return (Words) __builtin_convertvector(x, Ints);
}
// Returns 1 in each lane in which the condition is true, and 0 in the other
// lanes.
static inline uint32_t OneWhere(bool is) { return is; }
static inline Words OneWhere(Ints is) { return (Words)is & 1u; }
constexpr uint32_t kNoiseStep = 0x9e3779b9u;

// The offset that each lane of a register adds to the input of the noise
// function. The object is created once per call, because computing the offsets
// for each register would take as long as computing the noise.
struct NoisePlaces {
  NoisePlaces() {
    for (int i = 0; i < kLanes; ++i) of_register[i] = i * kNoiseStep;
  }
  uint32_t Of(uint32_t) const { return 0; }
  Words Of(Words) const { return of_register; }

  Words of_register;
};

// Returns the noise for the register of columns that starts at column c, or for
// column c. The noise function has two rounds of multiplications and shifts,
// with the constants of MurmurHash3's finalizer. Each round uses one half of
// the row's key.
template <typename W>
static inline W Noise(uint64_t key, uint32_t c, W places) {
  W x = places + (c * kNoiseStep + static_cast<uint32_t>(key));
  x ^= x >> 16;
  x *= 0x85ebca6bu;
  x += static_cast<uint32_t>(key >> 32);
  x ^= x >> 13;
  x *= 0xc2b2ae35u;
  return x ^ (x >> 16);
}

constexpr uint32_t kInfinity = 0x7f800000;

struct Bfloat16 {
  template <typename W>
  static auto Expand(W half) {
    return FromBits(half << 16);
  }

  // A finite value stays finite, because the result is limited to the largest
  // finite value.
  template <typename F, typename W>
  static W Round(F value, W noise) {
    const W zero = {};
    const W bits = BitsOf(value);
    const W magnitude = bits & 0x7fffffffu;
    const W sign = (bits >> 16) & 0x8000u;
    W half = (magnitude + (noise >> 16)) >> 16;
    half = half > zero + 0x7f7fu ? zero + 0x7f7fu : half;
    const W special =
        magnitude > zero + kInfinity ? zero + 0x7fc0u : zero + 0x7f80u;
    return sign | (magnitude < zero + kInfinity ? half : special);
  }
};

struct Float16 {
  template <typename W>
  static auto Expand(W half) {
    const W zero = {};
    const W magnitude = half & 0x7fffu;
    const W sign = (half & 0x8000u) << 16;
    const W normal = (magnitude << 13) + (112u << 23);
    const W subnormal = BitsOf(ToFloat(magnitude) * 0x1p-24f);
    const W special = (magnitude << 13) | kInfinity;
    W bits = magnitude < zero + 0x400u ? subnormal : normal;
    bits = magnitude < zero + 0x7c00u ? bits : special;
    return FromBits(sign | bits);
  }

  template <typename F, typename W>
  static W Round(F value, W noise) {
    const W zero = {};
    const W bits = BitsOf(value);
    const W magnitude = bits & 0x7fffffffu;
    const W sign = (bits >> 16) & 0x8000u;
    // Values of at least 2^-14 are normal float16 values. Rounding removes 13
    // bits of their mantissa.
    W half = ((magnitude + (noise >> 19)) >> 13) - (112u << 10);
    half = half > zero + 0x7bffu ? zero + 0x7bffu : half;
    // Smaller values are rounded to a multiple of 2^-24. The code compares the
    // fraction of this multiple with the noise, both as 24-bit integers.
    const auto is_small = magnitude < zero + 0x38800000u;
    const F scaled = FromBits(is_small ? magnitude : zero) * 0x1p24f;
    const W integer = ToInteger(scaled);
    const W fraction = ToInteger((scaled - ToFloat(integer)) * 0x1p24f);
    half = is_small ? integer + OneWhere((noise >> 8) < fraction) : half;
    const W special =
        magnitude > zero + kInfinity ? zero + 0x7e00u : zero + 0x7c00u;
    return sign | (magnitude < zero + kInfinity ? half : special);
  }
};

}  // namespace LM_ISA
}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SIMD_HALF_H_
