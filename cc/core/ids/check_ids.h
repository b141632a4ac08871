// The range check of ids.

#ifndef TF_LAYOUTMAP_CORE_IDS_CHECK_IDS_H_
#define TF_LAYOUTMAP_CORE_IDS_CHECK_IDS_H_

#include <algorithm>
#include <cstdint>
#include <string>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"

namespace layoutmap {

// One comparison covers both ends: a negative id becomes a huge number.
template <typename Tid>
inline bool IsOutside(Tid id, int64_t num_rows) {
  return static_cast<uint64_t>(static_cast<int64_t>(id)) >=
         static_cast<uint64_t>(num_rows);
}

// Refuses a list with an id outside [0, num_rows), naming the first. `table`
// is for the message; where it is not known, it is empty.
template <typename Tid>
Status CheckIds(Span<const Tid> ids, int64_t num_rows,
                const std::string& table = "") {
  // No branch, so that the loop runs at the speed of memory.
  bool bad = false;
  for (Tid id : ids) bad |= IsOutside(id, num_rows);
  if (!bad) return Status();
  const int64_t i =
      std::find_if(ids.begin(), ids.end(),
                   [&](Tid id) { return IsOutside(id, num_rows); }) -
      ids.begin();
  return InvalidArgument(
      "Id " + std::to_string(ids[i]) + " (ids[" + std::to_string(i) +
      "]) is outside " +
      (table.empty() ? "the table" : "table '" + table + "'") + " with " +
      std::to_string(num_rows) + " rows");
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_IDS_CHECK_IDS_H_
