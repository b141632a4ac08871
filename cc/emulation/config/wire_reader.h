// Walks over a serialized protocol buffer, field by field.
//
// Only as much of the format as a configuration needs; bytes that are none, or
// that end in the middle of a field, end the walk with `is_malformed`. It reads
// nothing outside of the bytes it was given and allocates nothing.

#ifndef TF_LAYOUTMAP_EMULATION_CONFIG_WIRE_READER_H_
#define TF_LAYOUTMAP_EMULATION_CONFIG_WIRE_READER_H_

#include <cstdint>

#include "cc/core/base/views.h"

namespace layoutmap {

using Bytes = Span<const uint8_t>;

// The numbers that the format gives them.
enum class WireType {
  kVarint = 0,
  kFixed64 = 1,
  kBytes = 2,
  kFixed32 = 5,
};

struct WireField {
  uint32_t number = 0;
  WireType type = WireType::kVarint;
  uint64_t value = 0;  // of a number; a float's or double's bits
  Bytes bytes;         // of a string, message or packed list

  // Zero, or empty, if the field is of another type: as a missing field.
  int64_t AsInt() const;
  bool AsBool() const { return AsInt() != 0; }
  float AsFloat() const;
};

class WireReader {
 public:
  explicit WireReader(Bytes bytes) : next_(bytes.begin()), end_(bytes.end()) {}

  // False at the end, and where the bytes are no field.
  bool Next(WireField* field);
  // One number of a packed list; false as `Next`.
  bool NextPacked(int64_t* value);

  bool is_malformed() const { return is_malformed_; }

 private:
  bool Varint(uint64_t* value);
  bool Fixed(int size, uint64_t* value);
  bool Malformed() {
    is_malformed_ = true;
    next_ = end_;
    return false;
  }

  const uint8_t* next_;
  const uint8_t* end_;
  bool is_malformed_ = false;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_CONFIG_WIRE_READER_H_
