// Stores the keys that a server has evicted from a shard, with the values of
// their rows, until the coordinator has read them.

#ifndef TF_LAYOUTMAP_CORE_SERVED_KEYS_EVICTED_ROWS_H_
#define TF_LAYOUTMAP_CORE_SERVED_KEYS_EVICTED_ROWS_H_

#include <cstdint>
#include <list>
#include <mutex>
#include <vector>

#include "cc/core/base/views.h"
#include "cc/core/vocabulary/first_rows.h"

namespace layoutmap {

// Evicted keys with copies of their rows.
struct EvictedBlock {
  std::vector<int64_t> keys;
  // The values of the table, and then the values of each slot variable, as
  // bytes: one row for each key.
  std::vector<std::vector<char>> values;
  int64_t num_bytes = 0;
};

// Copies the rows `at` of the table and of all slot variables in `rows`. The
// rows belong to the evicted keys `keys`.
EvictedBlock CopyEvicted(std::vector<int64_t> keys, Span<const int64_t> at,
                         const FirstRows& rows);

// The evicted keys of one shard, in the order of their evictions. All methods
// can be called from several threads.
class EvictedRows {
 public:
  // Adds the blocks to the stored blocks. The function does not allocate memory
  // and does not fail.
  void Add(std::list<EvictedBlock> blocks) noexcept;

  // Deletes the blocks before the number `reported`. Then copies the first
  // remaining blocks to `block`, until `block` has at least `max_bytes` bytes.
  // `block` is empty if no block remains. Returns the number of the next block,
  // which the next call must pass as `reported`, so that a block is deleted
  // only after the coordinator has received it.
  int64_t Read(int64_t reported, int64_t max_bytes, EvictedBlock* block);

 private:
  std::mutex mutex_;
  // Number of the first block in `blocks_`.
  int64_t first_ = 0;
  std::list<EvictedBlock> blocks_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVED_KEYS_EVICTED_ROWS_H_
