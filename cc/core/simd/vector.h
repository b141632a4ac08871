// A register's worth of floats. Only for files compiled once per instruction
// set: everything is in the namespace LM_ISA, or the linker would merge one
// set's copy of an inline function with another's.

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

// aligned(4): rows start anywhere.
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
  // The masked form: GCC 12 warns of the plain one's undefined operand.
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

// The order of operands lets NaN through: it must not become a limit.
template <typename V>
static inline V Clip(V x, V low, V high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}
template <typename V>
static inline V Abs(V x) {
  return x < V{} ? -x : x;
}
// Of values in [0, 2^31).
static inline float Floor(float x) {
  return static_cast<float>(static_cast<int>(x));
}
static inline Vector Floor(Vector x) {
  typedef int Ints __attribute__((vector_size(kLanes * 4)));
  return __builtin_convertvector(__builtin_convertvector(x, Ints), Vector);
}
// A value in every lane.
template <typename V>
static inline V Fill(float x) {
  return V{} + x;
}

#if defined(__AVX512F__)
// Half a register, for columns that fill no whole one. With smaller registers
// it is one.
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

// The same operation on one lane, for the columns that fill no register: it
// rounds like a lane of `Vector`, so the bits do not depend on the width.
static inline void Read(const float* p, float* x) { *x = *p; }
static inline void Read(const float* p, Vector* x) { *x = Load(p); }
static inline void Write(float* p, float x) { *p = x; }
static inline void Write(float* p, Vector x) { Store(p, x); }

}  // namespace LM_ISA
}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SIMD_VECTOR_H_
