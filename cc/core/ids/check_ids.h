// Checks the range of ids and creates the error message.

#ifndef TF_LAYOUTMAP_CORE_IDS_CHECK_IDS_H_
#define TF_LAYOUTMAP_CORE_IDS_CHECK_IDS_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"

namespace layoutmap {

// Returns whether an id is outside [0, num_rows). One comparison checks both
// bounds, because the conversion to an unsigned type makes a negative id very
// large.
template <typename Tid>
inline bool IsOutside(Tid id, int64_t num_rows) {
  return static_cast<uint64_t>(static_cast<int64_t>(id)) >=
         static_cast<uint64_t>(num_rows);
}

// Returns whether any id is outside [0, num_rows). An id is outside if the id
// or (num_rows - 1 - id) is negative. The loop combines the sign bits of these
// numbers, so that the compiler can vectorize it for every instruction set.
template <typename Tid>
inline bool AnyOutside(Span<const Tid> ids, int64_t num_rows) {
  typedef typename std::make_unsigned<Tid>::type Bits;
  const auto last = static_cast<Bits>(
      std::min<int64_t>(num_rows - 1, std::numeric_limits<Tid>::max()));
  Bits signs = 0;
  for (const Tid id : ids) {
    const Bits bits = static_cast<Bits>(id);
    signs |= bits | (last - bits);
  }
  return signs >> (std::numeric_limits<Bits>::digits - 1) != 0;
}

// Checks that all ids are in [0, num_rows). The error names the first invalid
// id:
//
//   Feature 'ads', sample 3: id 105 is outside table 'ad_table' with 100 rows
//
// `name_of(i)` returns the description of ids[i], such as "Feature 'ads',
// sample 3: id 105". If the table name is not known, `table` is an empty
// string.
template <typename Tid, typename NameOf>
Status CheckNamedIds(Span<const Tid> ids, int64_t num_rows,
                     const std::string& table, const NameOf& name_of) {
  if (!AnyOutside(ids, num_rows)) return Status();
  const int64_t i =
      std::find_if(ids.begin(), ids.end(),
                   [&](Tid id) { return IsOutside(id, num_rows); }) -
      ids.begin();
  return InvalidArgument(
      name_of(i) + " is outside " +
      (table.empty() ? "the table" : "table '" + table + "'") + " with " +
      std::to_string(num_rows) + " rows");
}

// Checks that all ids are in [0, num_rows). The error contains the value and
// the index of the first invalid id, such as "Id 105 (ids[7])".
template <typename Tid>
Status CheckIds(Span<const Tid> ids, int64_t num_rows,
                const std::string& table = "") {
  return CheckNamedIds(ids, num_rows, table, [&](int64_t i) {
    return "Id " + std::to_string(ids[i]) + " (ids[" + std::to_string(i) + "])";
  });
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_IDS_CHECK_IDS_H_
