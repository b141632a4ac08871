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

// A table restored from a checkpoint lies in pages of 4 KiB, so reads of random
// rows wait for address translation. The table keeps this memory during
// training. A background thread therefore moves the memory to huge pages while
// steps run. A table that gets new memory in each step is not moved.
class SettledMemory {
 public:
  SettledMemory() = default;
  SettledMemory(const SettledMemory&) = delete;
  SettledMemory& operator=(const SettledMemory&) = delete;
  ~SettledMemory();

  // Number of times that a range must be seen at one address before it is
  // moved. A step with a lookup and an update sees each range twice.
  static constexpr int kTimes = 8;

  // Records the addresses of the ranges [0, ranges.size()) in this step. Ranges
  // smaller than a few huge pages are ignored. The method is thread-safe.
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
