// Encodes values and rows in messages between processes.

#ifndef TF_LAYOUTMAP_CORE_SERVERS_WIRE_H_
#define TF_LAYOUTMAP_CORE_SERVERS_WIRE_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"

namespace layoutmap {

// Returns the size in bytes of a float32 or bfloat16 value.
constexpr int64_t WireBytes(RowType wire) {
  return wire == RowType::kFloat32 ? sizeof(float) : sizeof(uint16_t);
}

// Converts the value type of a message to a RowType. Returns an error if the
// type is not float32 or bfloat16.
Status ReadWireType(uint32_t type, RowType* wire);

// Rounds to the nearest bfloat16, ties to even. The relative error is at most
// 2^-8. A finite value stays finite.
uint16_t NearestBfloat16(float value);

void ToBfloat16(Span<const float> values, const ParallelFor& parallel_for,
                uint16_t* out);
void FromBfloat16(Span<const uint16_t> values, const ParallelFor& parallel_for,
                  float* out);

// Encodes rows in ascending order. Each row is encoded as its difference from
// the preceding row. The first row is encoded as its difference from 0. Each
// byte contains 7 bits of the difference, starting with the lowest bits. The
// highest bit of a byte is set if another byte follows. If a batch uses every
// hundredth row of a table, each row takes one byte.
class RowWriter {
 public:
  explicit RowWriter(std::vector<uint8_t>* bytes) : bytes_(bytes) {}
  // Adds a row, which must not be below the preceding row.
  void Add(uint32_t row);

 private:
  std::vector<uint8_t>* bytes_;
  uint32_t last_ = 0;
};

// Reads `count` rows at the start of `*bytes`, and removes them from `*bytes`.
enum class RowsRead { kAll, kTooFew, kOutOfRange };
RowsRead ReadRows(int64_t count, int64_t num_rows, Span<const uint8_t>* bytes,
                  std::vector<uint32_t>* rows, uint64_t* out_of_range);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVERS_WIRE_H_
