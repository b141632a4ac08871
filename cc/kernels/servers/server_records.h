// Records of a server that are not part of its variables: which rows have
// changed, and which keys were evicted. The records are lost if the server
// restarts, together with the rows.

#ifndef TF_LAYOUTMAP_KERNELS_SERVERS_SERVER_RECORDS_H_
#define TF_LAYOUTMAP_KERNELS_SERVERS_SERVER_RECORDS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "cc/core/base/views.h"
#include "cc/core/rows/changed_rows.h"
#include "cc/core/served_keys/evicted_rows.h"
#include "cc/core/served_keys/key_messages.h"

namespace layoutmap {

class ServerRecords {
 public:
  // `num_rows` is the number of rows of each shard.
  explicit ServerRecords(std::vector<int64_t> num_rows)
      : evicted_(num_rows.size()),
        keeps_evicted_(num_rows.size()),
        changed_(std::move(num_rows)) {}

  // Starts to record which rows change. Returns the number of the watch, see
  // `ChangedRows::Watch`.
  int64_t Watch() {
    is_watched_ = true;
    return changed_.Watch();
  }
  ChangedRows& changed() { return changed_; }

  // Records rows of a shard as changed. kNoPlace is ignored. The caller must
  // hold the locks under which it wrote the rows.
  void NoteChanged(size_t shard, const std::vector<uint32_t>& rows) {
    if (!is_watched_) return;
    std::vector<int64_t> known;
    known.reserve(rows.size());
    for (const uint32_t row : rows) {
      if (row != kNoPlace) known.push_back(row);
    }
    NoteChanged(shard, Span<const int64_t>(known));
  }
  void NoteChanged(size_t shard, Span<const int64_t> rows) {
    if (is_watched_) changed_.Note(static_cast<int32_t>(shard), rows);
  }

  // Starts to store the evicted keys of a shard.
  void KeepEvicted(size_t shard) { keeps_evicted_[shard] = true; }
  bool keeps_evicted(size_t shard) const { return keeps_evicted_[shard]; }
  EvictedRows& evicted(size_t shard) { return evicted_[shard]; }

  // Sets whether all ops with a handle of the server fail, because the
  // variables were replaced.
  void SetRetired(bool is_retired) { is_retired_ = is_retired; }
  bool is_retired() const { return is_retired_; }

 private:
  std::deque<EvictedRows> evicted_;
  std::deque<std::atomic<bool>> keeps_evicted_;
  std::atomic<bool> is_watched_{false};
  std::atomic<bool> is_retired_{false};
  ChangedRows changed_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_SERVERS_SERVER_RECORDS_H_
