// A SIMD register of floats. Include this file only from files that are
// compiled once per instruction set. All functions are in the namespace LM_ISA.
// Otherwise, the linker would merge the versions of an inline function for
// different instruction sets.

#ifndef TF_LAYOUTMAP_CORE_SIMD_VECTOR_H_
#define TF_LAYOUTMAP_CORE_SIMD_VECTOR_H_

#ifndef LM_ISA
#error "compile with -DLM_ISA=<namespace of the instruction set>"
#endif

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace layoutmap {
namespace LM_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// The alignment is 4 bytes, because a row can start at the address of any
// float.
typedef float Vector
    __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

static inline Vector Load(const float* p) {
  return *reinterpret_cast<const Vector*>(p);
}
static inline void Store(float* p, Vector v) {
  *reinterpret_cast<Vector*>(p) = v;
}

static inline float Sqrt(float x) { return __builtin_sqrtf(x); }
static inline Vector Sqrt(Vector x) {
#if defined(__AVX512F__)
  // The code uses the masked intrinsic, because GCC 12 warns about an undefined
  // operand in _mm512_sqrt_ps.
  return _mm512_maskz_sqrt_ps(0xffff, x);
#elif defined(__AVX__)
  return _mm256_sqrt_ps(x);
#elif defined(__SSE2__)
  return _mm_sqrt_ps(x);
#else
  Vector root;
  for (int i = 0; i < kLanes; ++i) root[i] = __builtin_sqrtf(x[i]);
  return root;
#endif
}

static inline float Pow(float x, float y) { return __builtin_powf(x, y); }
static inline Vector Pow(Vector x, float y) {
  Vector power = {};
  for (int i = 0; i < kLanes; ++i) power[i] = __builtin_powf(x[i], y);
  return power;
}

// This order of the operands preserves NaN. With the other order, the result
// for NaN would be one of the limits.
template <typename V>
static inline V Clip(V x, V low, V high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}
template <typename V>
static inline V Abs(V x) {
  return x < V{} ? -x : x;
}
// Rounds a value down. The value must be in [0, 2^31).
static inline float Floor(float x) {
  return static_cast<float>(static_cast<int>(x));
}
static inline Vector Floor(Vector x) {
  typedef int Ints __attribute__((vector_size(kLanes * 4)));
  return __builtin_convertvector(__builtin_convertvector(x, Ints), Vector);
}
// Returns a vector with the value x in every lane.
template <typename V>
static inline V Fill(float x) {
  return V{} + x;
}

#if defined(__AVX512F__)
// Half of an AVX-512 register, which processes remaining columns that do not
// fill a register. Other instruction sets do not need half registers.
typedef float HalfVector
    __attribute__((vector_size(32), aligned(4), may_alias));
constexpr int kHalfLanes = 8;

static inline HalfVector Sqrt(HalfVector x) { return _mm256_sqrt_ps(x); }
static inline HalfVector Pow(HalfVector x, float y) {
  HalfVector power = {};
  for (int i = 0; i < kHalfLanes; ++i) power[i] = __builtin_powf(x[i], y);
  return power;
}
static inline HalfVector Floor(HalfVector x) {
  typedef int Ints __attribute__((vector_size(32)));
  return __builtin_convertvector(__builtin_convertvector(x, Ints), HalfVector);
}
static inline void Read(const float* p, HalfVector* x) {
  *x = *reinterpret_cast<const HalfVector*>(p);
}
static inline void Write(float* p, HalfVector x) {
  *reinterpret_cast<HalfVector*>(p) = x;
}
#endif

// These overloads process the columns that do not fill a register. The
// overloads for a single float round in the same way as a lane of `Vector`, so
// that results are bitwise identical for all register widths.
static inline void Read(const float* p, float* x) { *x = *p; }
static inline void Read(const float* p, Vector* x) { *x = Load(p); }
static inline void Write(float* p, float x) { *p = x; }
static inline void Write(float* p, Vector x) { Store(p, x); }

}  // namespace LM_ISA
}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SIMD_VECTOR_H_
