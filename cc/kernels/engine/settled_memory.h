// Moves long-lived memory to huge pages.

#ifndef TF_LAYOUTMAP_KERNELS_ENGINE_SETTLED_MEMORY_H_
#define TF_LAYOUTMAP_KERNELS_ENGINE_SETTLED_MEMORY_H_

#include <atomic>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

#include "cc/core/memory/huge_pages.h"

namespace layoutmap {

// Moves the memory of tables to huge pages in a background thread, while steps
// run. A table that was restored from a checkpoint is in pages of 4 KiB, so
// reads of random rows wait for address translation. The table has the same
// memory during the whole training, so the move is worth its cost. If a table
// gets new memory in each step, it is not moved.
class SettledMemory {
 public:
  SettledMemory() = default;
  SettledMemory(const SettledMemory&) = delete;
  SettledMemory& operator=(const SettledMemory&) = delete;
  ~SettledMemory();

  // A range is moved after `See` has received it this many times with the same
  // address. A step calls `See` twice: for the lookup and for the update.
  static constexpr int kTimes = 8;

  // Records the current addresses of the ranges. A range has the same index in
  // all calls. Ranges that are smaller than a few huge pages are ignored. The
  // method is thread-safe.
  void See(const std::vector<MemoryRange>& ranges);

 private:
  struct Seen {
    const void* data = nullptr;
    int times = 0;
  };

  void Move();

  std::mutex mutex_;
  // `mutex_` guards all members below.
  std::vector<Seen> seen_;
  std::vector<MemoryRange> waiting_;
  std::thread thread_;
  bool is_moving_ = false;
  std::atomic<bool> stop_{false};
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_ENGINE_SETTLED_MEMORY_H_
