// Values and rows as they go from process to process.

#ifndef TF_LAYOUTMAP_CORE_SERVERS_WIRE_H_
#define TF_LAYOUTMAP_CORE_SERVERS_WIRE_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"

namespace layoutmap {

// Bytes of a value, float32 or bfloat16.
constexpr int64_t WireBytes(RowType wire) {
  return wire == RowType::kFloat32 ? sizeof(float) : sizeof(uint16_t);
}

// What a message says its values are; refused unless it is one of the two.
Status ReadWireType(uint32_t type, RowType* wire);

// The nearest bfloat16, of two that are equally near the even one: off by at
// most 2^-8 of the value. A finite value stays finite.
uint16_t NearestBfloat16(float value);

void ToBfloat16(Span<const float> values, const ParallelFor& parallel_for,
                uint16_t* out);
void FromBfloat16(Span<const uint16_t> values, const ParallelFor& parallel_for,
                  float* out);

// Rows that ascend, each as the difference to the one before it, the first to
// 0: 7 bits in a byte, the lowest first, the upper bit set where another byte
// follows. A table of which every hundredth row is needed takes one byte each.
class RowWriter {
 public:
  explicit RowWriter(std::vector<uint8_t>* bytes) : bytes_(bytes) {}
  // The same row may come again.
  void Add(uint32_t row);

 private:
  std::vector<uint8_t>* bytes_;
  uint32_t last_ = 0;
};

// Reads `count` rows from the front of `*bytes`, and moves it past them.
enum class RowsRead { kAll, kTooFew, kOutOfRange };
RowsRead ReadRows(int64_t count, int64_t num_rows, Span<const uint8_t>* bytes,
                  std::vector<uint32_t>* rows, uint64_t* out_of_range);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVERS_WIRE_H_
