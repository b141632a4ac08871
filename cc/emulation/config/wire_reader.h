// Reads a serialized protocol buffer, field by field.
//
// The reader supports the part of the format that TPU configurations use. If
// the bytes are malformed or end within a field, the iteration ends and
// `is_malformed` becomes true. The reader does not access memory outside of its
// input, and it does not allocate memory.

#ifndef TF_LAYOUTMAP_EMULATION_CONFIG_WIRE_READER_H_
#define TF_LAYOUTMAP_EMULATION_CONFIG_WIRE_READER_H_

#include <cstdint>

#include "cc/core/base/views.h"

namespace layoutmap {

using Bytes = Span<const uint8_t>;

// The wire types of the protocol buffer format, with their numbers.
enum class WireType {
  kVarint = 0,
  kFixed64 = 1,
  kBytes = 2,
  kFixed32 = 5,
};

struct WireField {
  uint32_t number = 0;
  WireType type = WireType::kVarint;
  // A number, or the bits of a float or double.
  uint64_t value = 0;
  // The bytes of a string, a message or a packed list.
  Bytes bytes;

  // These functions return the value of the field. If the field has another
  // type, they return the default value of a missing field.
  int64_t AsInt() const;
  bool AsBool() const { return AsInt() != 0; }
  float AsFloat() const;
};

class WireReader {
 public:
  explicit WireReader(Bytes bytes) : next_(bytes.begin()), end_(bytes.end()) {}

  // Reads the next field. Returns false at the end of the message or if the
  // bytes are malformed.
  bool Next(WireField* field);
  // Reads the next number of a packed list. Returns false at the end of the
  // list or if the bytes are malformed.
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
