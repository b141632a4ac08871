// Merges the keys of several tables that share a vocabulary.

#ifndef TF_LAYOUTMAP_CORE_KEYS_MERGED_KEYS_H_
#define TF_LAYOUTMAP_CORE_KEYS_MERGED_KEYS_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/views.h"
#include "cc/core/memory/raw_array.h"

namespace layoutmap {

// The keys of a step that a shared vocabulary counts. A key occurs in `keys` as
// often as in the table in which it occurs most often. If tables look up the
// same ids, each id is therefore counted once.
struct MergedKeys {
  // All keys of the first table, followed by the keys of the other tables that
  // occur more often there than in the tables before.
  std::vector<int64_t> keys;
  // For each table, the index in `keys` of the first occurrence of each of its
  // keys. If this array is empty, the keys of the table are the first values of
  // `keys`.
  std::vector<RawArray<uint32_t>> places;
};

// `tables` are the keys of each table, in total fewer than 2^32 - 1. The result
// does not depend on the addresses of the keys.
MergedKeys MergeKeys(const std::vector<Span<const int64_t>>& tables);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_KEYS_MERGED_KEYS_H_
