#include "cc/core/collectives/reduction.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"

namespace layoutmap {
namespace {

// The elements of a block are merged in registers and in the first-level cache.
constexpr int64_t kBlock = 512;
// A thread gets at least this number of elements.
constexpr int64_t kGrain = 16384;

template <typename T>
T FromBits(uint32_t bits) {
  T value;
  static_assert(sizeof(value) == sizeof(bits));
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}

uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// An element type is described by its representation in memory, by the type of
// its arithmetic, and by conversions between them. `Rounded` returns the value
// that is read after `value` was written.
template <typename T>
struct Plain {
  using Stored = T;
  using Value = T;
  static Value Read(Stored stored) { return stored; }
  static Stored Write(Value value) { return value; }
  static Value Rounded(Value value) { return value; }
};

struct Bfloat16 {
  using Stored = uint16_t;
  using Value = float;
  static Value Read(Stored stored) {
    return FromBits<float>(static_cast<uint32_t>(stored) << 16);
  }
  // Rounds to nearest, ties to even.
  static Stored Write(Value value) {
    const uint32_t bits = BitsOf(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t nan = ((bits >> 16) & 0x8000u) | 0x7fc0u;
    return static_cast<Stored>(value != value ? nan : rounded);
  }
  static Value Rounded(Value value) { return Read(Write(value)); }
};

struct Half {
  using Stored = uint16_t;
  using Value = float;
  static Value Read(Stored stored) {
    const uint32_t sign = static_cast<uint32_t>(stored & 0x8000u) << 16;
    const uint32_t magnitude = static_cast<uint32_t>(stored & 0x7fffu) << 13;
    // Adds the difference of the exponents' biases. Subnormal values are
    // normalized by an exact subtraction.
    const uint32_t normal = magnitude + (112u << 23);
    const float subnormal =
        FromBits<float>(magnitude + (113u << 23)) - FromBits<float>(113u << 23);
    const uint32_t special = magnitude + (224u << 23);
    const uint32_t bits = magnitude < (1u << 23)    ? BitsOf(subnormal)
                          : magnitude < (31u << 23) ? normal
                                                    : special;
    return FromBits<float>(sign | bits);
  }
  // Rounds to nearest, ties to even.
  static Stored Write(Value value) {
    const uint32_t bits = BitsOf(value);
    const uint32_t sign = bits & 0x80000000u;
    const uint32_t magnitude = bits ^ sign;
    // The addition of 0.5 moves the bits of a subnormal result to the end of
    // the float, and rounds them.
    const uint32_t subnormal =
        BitsOf(FromBits<float>(magnitude) + 0.5f) - BitsOf(0.5f);
    const uint32_t normal =
        (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t infinity_or_nan =
        magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t half = magnitude >= (143u << 23)  ? infinity_or_nan
                          : magnitude < (113u << 23) ? subnormal
                                                     : normal;
    return static_cast<Stored>((sign >> 16) | half);
  }
  static Value Rounded(Value value) { return Read(Write(value)); }
};

// Integers wrap around, which is not defined for signed types.
template <typename T>
using Wrapping =
    typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>,
                                std::enable_if<true, T>>::type;

struct Add {
  template <typename T>
  static T Merge(T own, T merged) {
    return static_cast<T>(static_cast<Wrapping<T>>(own) +
                          static_cast<Wrapping<T>>(merged));
  }
};
struct Mul {
  template <typename T>
  static T Merge(T own, T merged) {
    return static_cast<T>(static_cast<Wrapping<T>>(own) *
                          static_cast<Wrapping<T>>(merged));
  }
};
// Replaces subnormal values by 0, as TensorFlow does for maxima and minima.
template <typename T>
T WithoutSubnormal(T value) {
  if constexpr (std::is_floating_point_v<T>) {
    const bool is_small = std::fabs(value) < std::numeric_limits<T>::min();
    return is_small ? std::copysign(T(0), value) : value;
  }
  return value;
}

struct Max {
  template <typename T>
  static T Merge(T own, T merged) {
    return own != own         ? own
           : merged != merged ? merged
                              : WithoutSubnormal(own < merged ? merged : own);
  }
};
struct Min {
  template <typename T>
  static T Merge(T own, T merged) {
    return own != own         ? own
           : merged != merged ? merged
                              : WithoutSubnormal(merged < own ? merged : own);
  }
};

template <typename Element, typename Op>
void ReduceRange(FinalOp final, Span<const void* const> inputs,
                 int64_t chunk_elements, int64_t begin, int64_t end,
                 void* output) {
  using Stored = typename Element::Stored;
  using Value = typename Element::Value;
  const int64_t num_devices = inputs.size();
  Value merged[kBlock];
  for (int64_t start = begin; start < end;) {
    const int64_t chunk = start / chunk_elements;
    const int64_t limit =
        std::min({end, (chunk + 1) * chunk_elements, start + kBlock});
    const int64_t count = limit - start;
    for (int64_t step = 0; step < num_devices; ++step) {
      const Stored* own =
          static_cast<const Stored*>(inputs[(chunk + step) % num_devices]) +
          start;
      if (step == 0) {
        for (int64_t i = 0; i < count; ++i) merged[i] = Element::Read(own[i]);
        continue;
      }
      for (int64_t i = 0; i < count; ++i) {
        merged[i] =
            Element::Rounded(Op::Merge(Element::Read(own[i]), merged[i]));
      }
    }
    if (final == FinalOp::kDivide) {
      const Value divisor = static_cast<Value>(num_devices);
      for (int64_t i = 0; i < count; ++i) merged[i] /= divisor;
    }
    Stored* out = static_cast<Stored*>(output) + start;
    for (int64_t i = 0; i < count; ++i) out[i] = Element::Write(merged[i]);
    start = limit;
  }
}

template <typename Element>
auto RangeFunction(MergeOp merge) {
  switch (merge) {
    case MergeOp::kAdd:
      return ReduceRange<Element, Add>;
    case MergeOp::kMul:
      return ReduceRange<Element, Mul>;
    case MergeOp::kMax:
      return ReduceRange<Element, Max>;
    case MergeOp::kMin:
      break;
  }
  return ReduceRange<Element, Min>;
}

auto RangeFunction(const Reduction& reduction) {
  switch (reduction.type) {
    case ElementType::kFloat:
      return RangeFunction<Plain<float>>(reduction.merge);
    case ElementType::kDouble:
      return RangeFunction<Plain<double>>(reduction.merge);
    case ElementType::kHalf:
      return RangeFunction<Half>(reduction.merge);
    case ElementType::kBfloat16:
      return RangeFunction<Bfloat16>(reduction.merge);
    case ElementType::kInt32:
      return RangeFunction<Plain<int32_t>>(reduction.merge);
    case ElementType::kInt64:
      break;
  }
  return RangeFunction<Plain<int64_t>>(reduction.merge);
}

}  // namespace

int64_t BytesPerElement(ElementType type) {
  switch (type) {
    case ElementType::kHalf:
    case ElementType::kBfloat16:
      return 2;
    case ElementType::kFloat:
    case ElementType::kInt32:
      return 4;
    case ElementType::kDouble:
    case ElementType::kInt64:
      break;
  }
  return 8;
}

void Reduce(const Reduction& reduction, Span<const void* const> inputs,
            int64_t num_elements, int64_t chunk_elements,
            const ParallelFor& parallel_for, void* output) {
  assert(inputs.size() > 0);
  assert(num_elements == 0 || chunk_elements > 0);
  assert(chunk_elements * static_cast<int64_t>(inputs.size()) >= num_elements);
  const auto reduce = RangeFunction(reduction);
  if (num_elements <= 2 * kGrain) {
    reduce(reduction.final, inputs, chunk_elements, 0, num_elements, output);
    return;
  }
  const int64_t num_grains = (num_elements + kGrain - 1) / kGrain;
  // One core reads and writes about one element per nanosecond and device.
  const int64_t cost = kGrain * static_cast<int64_t>(inputs.size() + 1) / 4;
  parallel_for(num_grains, cost, [&](int64_t begin, int64_t end) {
    reduce(reduction.final, inputs, chunk_elements, begin * kGrain,
           std::min(end * kGrain, num_elements), output);
  });
}

}  // namespace layoutmap
