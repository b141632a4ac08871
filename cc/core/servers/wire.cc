#include "cc/core/servers/wire.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"

namespace layoutmap {

namespace {

constexpr int kBits = 7;
constexpr uint8_t kMore = 1 << kBits;
// The maximum size of an encoded 32-bit value in bytes.
constexpr int kMaxBytes = 5;

}  // namespace

Status ReadWireType(uint32_t type, RowType* wire) {
  if (type != static_cast<uint32_t>(RowType::kFloat32) &&
      type != static_cast<uint32_t>(RowType::kBfloat16)) {
    return InvalidArgument(
        "`request` must have values of type 0 (float32) or 1 (bfloat16). "
        "Received: type " +
        std::to_string(type));
  }
  *wire = static_cast<RowType>(type);
  return Status();
}

// The code uses signed integers, because every instruction set has instructions
// to compare them.
uint16_t NearestBfloat16(float value) {
  constexpr int32_t kInfinity = 0x7f800000, kLargest = 0x7f7f;
  int32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const int32_t magnitude = bits & 0x7fffffff;
  const int32_t is_odd = (magnitude >> 16) & 1;
  // The sum can overflow only if the value is NaN. In this case, the sum is not
  // used. The sum is unsigned, so that its overflow is defined.
  const auto sum = static_cast<uint32_t>(magnitude) + 0x7fff + is_odd;
  int32_t half = static_cast<int32_t>(sum >> 16);
  half = half > kLargest ? kLargest : half;
  half = magnitude < kInfinity ? half : magnitude > kInfinity ? 0x7fc0 : 0x7f80;
  return static_cast<uint16_t>(((bits >> 16) & 0x8000) | half);
}

void ToBfloat16(Span<const float> values, const ParallelFor& parallel_for,
                uint16_t* out) {
  parallel_for(values.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) out[i] = NearestBfloat16(values[i]);
  });
}

void FromBfloat16(Span<const uint16_t> values, const ParallelFor& parallel_for,
                  float* out) {
  parallel_for(values.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t bits = uint32_t{values[i]} << 16;
      std::memcpy(out + i, &bits, sizeof(bits));
    }
  });
}

void RowWriter::Add(uint32_t row) {
  uint32_t rest = row - last_;
  last_ = row;
  for (; rest >= kMore; rest >>= kBits) {
    bytes_->push_back(static_cast<uint8_t>(rest | kMore));
  }
  bytes_->push_back(static_cast<uint8_t>(rest));
}

RowsRead ReadRows(int64_t count, int64_t num_rows, Span<const uint8_t>* bytes,
                  std::vector<uint32_t>* rows, uint64_t* out_of_range) {
  // The number of bytes is checked before memory is allocated.
  if (count > bytes->size()) return RowsRead::kTooFew;
  rows->resize(count);
  const uint8_t* next = bytes->data();
  const uint8_t* const end = next + bytes->size();
  uint64_t row = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint64_t difference = 0;
    for (int b = 0;; ++b) {
      if (next == end || b == kMaxBytes) return RowsRead::kTooFew;
      const uint8_t byte = *next++;
      difference |= static_cast<uint64_t>(byte & (kMore - 1)) << (kBits * b);
      if (byte < kMore) break;
    }
    row += difference;
    if (row >= static_cast<uint64_t>(num_rows)) {
      *out_of_range = row;
      return RowsRead::kOutOfRange;
    }
    (*rows)[i] = static_cast<uint32_t>(row);
  }
  *bytes = {next, end - next};
  return RowsRead::kAll;
}

}  // namespace layoutmap
