#include "cc/emulation/config/wire_reader.h"

#include <cstdint>
#include <cstring>

namespace layoutmap {

int64_t WireField::AsInt() const {
  return type == WireType::kVarint ? static_cast<int64_t>(value) : 0;
}

float WireField::AsFloat() const {
  if (type != WireType::kFixed32) return 0;
  const uint32_t bits = static_cast<uint32_t>(value);
  float number;
  std::memcpy(&number, &bits, sizeof(number));
  return number;
}

bool WireReader::Varint(uint64_t* value) {
  *value = 0;
  // A 64-bit value requires up to ten groups of seven bits.
  for (int shift = 0; shift < 70; shift += 7) {
    if (next_ == end_) return Malformed();
    const uint8_t byte = *next_++;
    // The value has 64 bits, so only one bit of the tenth group is valid.
    if (shift == 63 && byte > 1) return Malformed();
    *value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return true;
  }
  return Malformed();
}

bool WireReader::Fixed(int size, uint64_t* value) {
  if (end_ - next_ < size) return Malformed();
  *value = 0;
  for (int i = 0; i < size; ++i) {
    *value |= static_cast<uint64_t>(*next_++) << (8 * i);
  }
  return true;
}

bool WireReader::Next(WireField* field) {
  if (next_ == end_) return false;
  uint64_t tag;
  if (!Varint(&tag)) return false;
  // A field number has 29 bits and is at least 1.
  if (tag >> 32 != 0 || tag >> 3 == 0) return Malformed();
  *field = WireField();
  field->number = static_cast<uint32_t>(tag >> 3);
  field->type = static_cast<WireType>(tag & 7);
  switch (field->type) {
    case WireType::kVarint:
      return Varint(&field->value);
    case WireType::kFixed64:
      return Fixed(8, &field->value);
    case WireType::kFixed32:
      return Fixed(4, &field->value);
    case WireType::kBytes: {
      uint64_t size;
      if (!Varint(&size)) return false;
      if (size > static_cast<uint64_t>(end_ - next_)) return Malformed();
      field->bytes = {next_, static_cast<int64_t>(size)};
      next_ += size;
      return true;
    }
  }
  // Groups are deprecated, and the reader does not support them.
  return Malformed();
}

bool WireReader::NextPacked(int64_t* value) {
  uint64_t bits;
  if (next_ == end_ || !Varint(&bits)) return false;
  *value = static_cast<int64_t>(bits);
  return true;
}

}  // namespace layoutmap
