#include "cc/core/keys/merged_keys.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "cc/core/base/views.h"
#include "cc/core/keys/keys_by_segment.h"
#include "cc/core/memory/raw_array.h"

namespace layoutmap {
namespace {

bool AreEqual(Span<const int64_t> a, Span<const int64_t> b) {
  return a.size() == b.size() &&
         (a.data() == b.data() || std::equal(a.begin(), a.end(), b.begin()));
}

// Counts the occurrences of each key in one table after the other.
class Merger {
 public:
  Merger(int64_t num_keys, std::vector<int64_t>* keys)
      : keys_(keys),
        slots_(FirstOccurrences::NumSlots(num_keys)),
        first_of_(slots_),
        counts_(num_keys) {}

  // Adds the keys of a table. If `places` is not null, sets it to the index of
  // the first occurrence of each key in the merged keys. If `is_merged` is
  // true, the keys are already in the merged keys.
  void Add(Span<const int64_t> table, bool is_merged, uint32_t* places) {
    ++table_;
    for (int64_t i = 0; i < table.size(); ++i) {
      const int64_t key = table[i];
      const auto next = static_cast<uint32_t>(is_merged ? i : keys_->size());
      const uint32_t first =
          first_of_.Add(key, next, [this](uint32_t n) { return (*keys_)[n]; });
      Counts& counts = counts_[first];
      if (first == next) counts = {0, 0, table_};
      if (counts.table != table_) {
        counts.in_table = 0;
        counts.table = table_;
      }
      if (++counts.in_table > counts.in_total) {
        counts.in_total = counts.in_table;
        if (!is_merged) keys_->push_back(key);
      }
      if (places != nullptr) places[i] = first;
    }
  }

 private:
  struct Counts {
    // Number of occurrences in the merged keys, and in the current table.
    uint32_t in_total;
    uint32_t in_table;
    // Number of the last table in which the key occurred.
    uint32_t table;
  };

  std::vector<int64_t>* keys_;
  RawArray<uint32_t> slots_;
  FirstOccurrences first_of_;
  // The counts of each key, indexed by its first occurrence.
  RawArray<Counts> counts_;
  uint32_t table_ = 0;
};

}  // namespace

MergedKeys MergeKeys(const std::vector<Span<const int64_t>>& tables) {
  MergedKeys merged;
  merged.places.resize(tables.size());
  if (tables.empty()) return merged;
  int64_t num_keys = 0;
  bool all_equal = true;
  for (const Span<const int64_t> table : tables) {
    num_keys += table.size();
    all_equal &= AreEqual(table, tables[0]);
  }
  // Tables that look up the same ids are the most frequent case.
  merged.keys.assign(tables[0].begin(), tables[0].end());
  if (all_equal) return merged;
  Merger merger(num_keys, &merged.keys);
  merger.Add(tables[0], true, nullptr);
  for (size_t t = 1; t < tables.size(); ++t) {
    if (AreEqual(tables[t], tables[0])) continue;
    RawArray<uint32_t> places(tables[t].size());
    merger.Add(tables[t], false, places.data());
    merged.places[t] = std::move(places);
  }
  return merged;
}

}  // namespace layoutmap
