#include "cc/kernels/engine/settled_memory.h"

#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

#include "cc/core/memory/huge_pages.h"

namespace layoutmap {
namespace {

// Minimum size of a memory range that is moved, in bytes. Smaller tables fit in
// the caches.
constexpr size_t kLeastBytes = size_t{1} << 23;

}  // namespace

SettledMemory::~SettledMemory() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
}

void SettledMemory::See(const std::vector<MemoryRange>& ranges) {
  // If another thread holds the mutex, that thread counts this step.
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  if (seen_.size() < ranges.size()) seen_.resize(ranges.size());
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (ranges[i].num_bytes < kLeastBytes) continue;
    Seen& seen = seen_[i];
    if (seen.data != ranges[i].data) seen = {ranges[i].data, 0};
    if (seen.times > kTimes) continue;
    if (++seen.times == kTimes) waiting_.push_back(ranges[i]);
  }
  if (waiting_.empty() || is_moving_) return;
  is_moving_ = true;
  if (thread_.joinable()) thread_.join();  // The thread has finished its work.
  thread_ = std::thread([this] { Move(); });
}

void SettledMemory::Move() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!waiting_.empty() && !stop_) {
    const MemoryRange range = waiting_.back();
    waiting_.pop_back();
    lock.unlock();
    const bool is_moved = MoveToHugePages(range, stop_);
    lock.lock();
    // If the move has failed, the system does not support it or has no free
    // huge page, so the code does not try to move other ranges.
    if (!is_moved) waiting_.clear();
  }
  is_moving_ = false;
}

}  // namespace layoutmap
