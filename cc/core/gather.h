// Rows of a sharded table, one per id.

#ifndef TF_LAYOUTMAP_CORE_GATHER_H_
#define TF_LAYOUTMAP_CORE_GATHER_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cc/core/lookup.h"
#include "cc/core/parallel_for.h"
#include "cc/core/status.h"
#include "cc/core/views.h"

namespace layoutmap {

// Refuses a list with an id outside [0, num_rows), naming the first. `table`
// is for the message.
template <typename Tid>
Status CheckIds(Span<const Tid> ids, int64_t num_rows,
                const std::string& table) {
  // One comparison covers both ends: a negative id becomes a huge number. No
  // branch, so that the loop runs at the speed of memory.
  auto outside = [num_rows](Tid id) {
    return static_cast<uint64_t>(static_cast<int64_t>(id)) >=
           static_cast<uint64_t>(num_rows);
  };
  bool bad = false;
  for (Tid id : ids) bad |= outside(id);
  if (!bad) return Status();
  const int64_t i = std::find_if(ids.begin(), ids.end(), outside) - ids.begin();
  return InvalidArgument("Id " + std::to_string(ids[i]) + " (ids[" +
                         std::to_string(i) + "]) is outside table '" + table +
                         "' with " + std::to_string(num_rows) + " rows");
}

// Asks for all cache lines of a row.
template <bool kForWrite>
inline void PrefetchRow(const void* row, int64_t row_bytes) {
  constexpr int64_t kLineBytes = 64;
  // A row of many lines is fetched ahead by the hardware once it is begun.
  const int64_t bytes = std::min<int64_t>(row_bytes, 8 * kLineBytes);
  for (int64_t b = 0; b < bytes; b += kLineBytes) {
    __builtin_prefetch(static_cast<const char*>(row) + b, kForWrite);
  }
}

// out[i, :] = table[ids[i], :]. ids come checked; out is [num_ids, table.dim].
template <typename T, typename Tid>
void GatherRows(const ShardedView<const T>& table, Span<const Tid> ids,
                const ParallelFor& parallel_for, T* out) {
  const int64_t row_bytes = table.dim * static_cast<int64_t>(sizeof(T));
  auto work = [&](int64_t begin, int64_t end) {
    const T* ahead[kAhead];
    for (int64_t i = begin; i < std::min(begin + kAhead, end); ++i) {
      ahead[i % kAhead] = table.row(ids[i]);
      PrefetchRow<false>(ahead[i % kAhead], row_bytes);
    }
    for (int64_t i = begin; i < end; ++i) {
      const T* row = ahead[i % kAhead];
      if (i + kAhead < end) {
        ahead[i % kAhead] = table.row(ids[i + kAhead]);
        PrefetchRow<false>(ahead[i % kAhead], row_bytes);
      }
      std::copy_n(row, table.dim, out + i * table.dim);
    }
  };
  parallel_for(ids.size(), 10 + row_bytes / 16, work);
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_GATHER_H_
