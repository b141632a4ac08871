#include "cc/core/vocabulary/first_rows.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/row_queue.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/first_values.h"
#include "cc/core/memory/raw_array.h"
#include "cc/core/simd/key_kernels.h"
#include "cc/core/vocabulary/admit_keys.h"

namespace layoutmap {
namespace {

uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

// Shifts `bits` to the right by `shift` bits and rounds the result to nearest,
// ties to even.
uint32_t ShiftRounded(uint32_t bits, int shift) {
  const uint32_t half = uint32_t{1} << (shift - 1);
  return (bits + half - 1 + (bits >> shift & 1)) >> shift;
}

uint16_t ToBfloat16(float x) {
  return static_cast<uint16_t>(ShiftRounded(BitsOf(x), 16));
}

uint16_t ToFloat16(float x) {
  const uint32_t bits = BitsOf(x);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const int exponent = static_cast<int>(magnitude >> 23);
  // The biased float32 exponent of the smallest normal float16 value, 2^-14.
  constexpr int kSmallest = 127 - 14;
  uint32_t half;
  if (exponent >= kSmallest) {
    half = ShiftRounded(
        magnitude - (static_cast<uint32_t>(kSmallest - 1) << 23), 13);
  } else {
    // The value is rounded to a multiple of 2^-24, the smallest positive
    // float16 value.
    const int shift = 13 + kSmallest - exponent;
    const uint32_t digits = (magnitude & 0x7FFFFFu) | 0x800000u;
    half = shift > 24 + 1 ? 0 : ShiftRounded(digits, shift);
  }
  return static_cast<uint16_t>(sign | half);
}

// Prefetch distance in rows. Prefetches are useful because the rows of new keys
// are scattered over the table.
constexpr int64_t kRowsAhead = 8;

void Prefetch(const FirstRows& first, int64_t row) {
  if (first.row_type == RowType::kFloat32) {
    PrefetchRow(first.table.row(row), first.table.dim * sizeof(float));
  } else {
    PrefetchRow(first.half_table.row(row),
                first.half_table.dim * sizeof(uint16_t));
  }
  for (const ShardedView<float>& slot : first.slots) {
    PrefetchRow(slot.row(row), slot.dim * sizeof(float));
  }
}

}  // namespace

void WriteFirstRows(const FirstRows& first, Span<const NewKey> new_keys,
                    const ParallelFor& parallel_for,
                    const KeyKernels& kernels) {
  const bool is_half = first.row_type != RowType::kFloat32;
  const int64_t dim = is_half ? first.half_table.dim : first.table.dim;
  const int64_t nanoseconds_per_key = 20 + 5 * dim;
  // Memory for the float values of all rows, allocated here because workers
  // cannot handle a failed allocation.
  const RawArray<float> values(is_half ? new_keys.size() * dim : 0);
  parallel_for(
      new_keys.size(), nanoseconds_per_key, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          Prefetch(first, new_keys[std::min(i + kRowsAhead, end - 1)].row);
          const int64_t row = new_keys[i].row;
          float* out = is_half ? values.data() + i * dim : first.table.row(row);
          FillFirstValues(first.values, new_keys[i].key, {out, dim}, kernels);
          if (is_half) {
            std::transform(
                out, out + dim, first.half_table.row(row),
                first.row_type == RowType::kBfloat16 ? ToBfloat16 : ToFloat16);
          }
          for (size_t j = 0; j < first.slots.size(); ++j) {
            std::fill_n(first.slots[j].row(row), first.slots[j].dim,
                        first.slot_values[j]);
          }
        }
      });
}

}  // namespace layoutmap
