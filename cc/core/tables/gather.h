// Gathers one row of a sharded table for each id.

#ifndef TF_LAYOUTMAP_CORE_TABLES_GATHER_H_
#define TF_LAYOUTMAP_CORE_TABLES_GATHER_H_

#include <algorithm>
#include <cstdint>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/row_queue.h"
#include "cc/core/base/views.h"
#include "cc/core/tables/sharded_view.h"

namespace layoutmap {

// Computes out[i, :] = table[ids[i], :]. `ids` must have been validated. `out`
// is [num_ids, table.dim].
template <typename T, typename Tid>
void GatherRows(const ShardedView<const T>& table, Span<const Tid> ids,
                const ParallelFor& parallel_for, T* out) {
  const int64_t row_bytes = table.dim * static_cast<int64_t>(sizeof(T));
  auto work = [&](int64_t begin, int64_t end) {
    // The lambda captures `dim` by value. With a reference, the code would read
    // `dim` again for every row, because the compiler must assume that a write
    // to `out` changes it.
    auto copy = [dim = table.dim](const T* row, T* to) {
      std::copy_n(row, dim, to);
    };
    table.WithRow([&, dim = table.dim, row_bytes](auto row_of) {
      RowQueue<const T, T, decltype(copy)> queue(copy);
      const Tid* const id = ids.data();
      T* to = out + begin * dim;
      for (int64_t i = begin; i < end; ++i, to += dim) {
        const T* row = row_of(id[i]);
        PrefetchRow(row, row_bytes);
        queue.Push(row, to);
      }
    });
  };
  parallel_for(ids.size(), 10 + row_bytes / 16, work);
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_TABLES_GATHER_H_
