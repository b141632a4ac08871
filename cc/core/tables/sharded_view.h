// A view of the rows in a sharded table.

#ifndef TF_LAYOUTMAP_CORE_TABLES_SHARDED_VIEW_H_
#define TF_LAYOUTMAP_CORE_TABLES_SHARDED_VIEW_H_

#include <cstdint>
#include <vector>

#include "cc/core/rows/row_partition.h"

namespace layoutmap {

// A view of the rows of all shards in `partition`. Each shard is [shard size,
// dim].
template <typename T>
struct ShardedView {
  const RowPartition* partition = nullptr;
  std::vector<T*> shards;
  int64_t dim = 0;

  T* row(int64_t global_row) const {
    const RowOwner owner = partition->Locate(global_row);
    return shards[owner.shard] + owner.local_row * dim;
  }

  // Calls `work(row_of)`. The function row_of(r) returns the same pointer as
  // `row(r)` and is faster in loops.
  template <typename Work>
  void WithRow(const Work& work) const {
    partition->WithLocate([&](auto locate) {
      work([locate, shards = shards.data(), dim = dim](int64_t global_row) {
        const RowOwner owner = locate(global_row);
        return shards[owner.shard] + owner.local_row * dim;
      });
    });
  }
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_TABLES_SHARDED_VIEW_H_
