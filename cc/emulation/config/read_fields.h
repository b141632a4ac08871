// Reads the fields of a message and reports malformed fields.

#ifndef TF_LAYOUTMAP_EMULATION_CONFIG_READ_FIELDS_H_
#define TF_LAYOUTMAP_EMULATION_CONFIG_READ_FIELDS_H_

#include <cstdint>
#include <string>

#include "cc/core/base/status.h"
#include "cc/emulation/config/wire_reader.h"

namespace layoutmap {

inline Status MalformedBytes(const std::string& what) {
  return InvalidArgument("The bytes of " + what +
                         " must be a valid protocol buffer of its type");
}

// Calls `visit(field)` for each field of a message. Returns the first error of
// `visit`, or an error if a field is malformed.
template <typename Visit>
Status ForFields(Bytes bytes, const std::string& what, const Visit& visit) {
  WireReader reader(bytes);
  WireField one;
  while (reader.Next(&one)) LM_RETURN_IF_ERROR(visit(one));
  return reader.is_malformed() ? MalformedBytes(what) : Status();
}

inline std::string AsString(Bytes bytes) {
  return std::string(bytes.begin(), bytes.end());
}

inline Status CheckRange(const std::string& what, int64_t value, int64_t low,
                         int64_t high) {
  if (value >= low && value <= high) return Status();
  return InvalidArgument(what + " must be in [" + std::to_string(low) + ", " +
                         std::to_string(high) +
                         "]. Received: " + std::to_string(value));
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_CONFIG_READ_FIELDS_H_
