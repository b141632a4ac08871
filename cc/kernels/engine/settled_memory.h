// Moves memory that stays where it is into large pages.

#ifndef TF_LAYOUTMAP_KERNELS_ENGINE_SETTLED_MEMORY_H_
#define TF_LAYOUTMAP_KERNELS_ENGINE_SETTLED_MEMORY_H_

#include <atomic>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

#include "cc/core/memory/huge_pages.h"

namespace layoutmap {

// A table that a checkpoint gave lies in pages of 4 KiB, of which random rows
// wait for the address. It keeps its memory from then on, so a thread of its
// own moves it while steps go on. A table that gets new memory in each step is
// left alone.
class SettledMemory {
 public:
  SettledMemory() = default;
  SettledMemory(const SettledMemory&) = delete;
  SettledMemory& operator=(const SettledMemory&) = delete;
  ~SettledMemory();

  // How often a range is seen in one place before it is moved; a step that
  // looks up and updates sees it twice.
  static constexpr int kTimes = 8;

  // Takes where ranges [0, ranges.size()) are in this step. Ranges below the
  // size of a few large pages do not count. Any thread may call it.
  void See(const std::vector<MemoryRange>& ranges);

 private:
  struct Seen {
    const void* data = nullptr;
    int times = 0;
  };

  void Move();

  std::mutex mutex_;
  // All of it by `mutex_`.
  std::vector<Seen> seen_;
  std::vector<MemoryRange> waiting_;
  std::thread thread_;
  bool is_moving_ = false;
  std::atomic<bool> stop_{false};
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_ENGINE_SETTLED_MEMORY_H_
