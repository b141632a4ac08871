// Reads a serialized protocol buffer, field by field.
//
// The reader supports the part of the format that a configuration requires.
// Malformed bytes, or bytes that end within a field, end the iteration and set
// `is_malformed`. The reader does not access memory outside of its input and
// does not allocate memory.

#ifndef TF_LAYOUTMAP_EMULATION_CONFIG_WIRE_READER_H_
#define TF_LAYOUTMAP_EMULATION_CONFIG_WIRE_READER_H_

#include <cstdint>

#include "cc/core/base/views.h"

namespace layoutmap {

using Bytes = Span<const uint8_t>;

// Numbers of the wire types in the format.
enum class WireType {
  kVarint = 0,
  kFixed64 = 1,
  kBytes = 2,
  kFixed32 = 5,
};

struct WireField {
  uint32_t number = 0;
  WireType type = WireType::kVarint;
  uint64_t value = 0;  // number, or bits of a float or double
  Bytes bytes;         // string, message or packed list

  // Returns zero or an empty value if the field has another type, like for a
  // missing field.
  int64_t AsInt() const;
  bool AsBool() const { return AsInt() != 0; }
  float AsFloat() const;
};

class WireReader {
 public:
  explicit WireReader(Bytes bytes) : next_(bytes.begin()), end_(bytes.end()) {}

  // Reads the next field. Returns false at the end and for malformed bytes.
  bool Next(WireField* field);
  // Reads the next number of a packed list. Returns false like `Next`.
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
