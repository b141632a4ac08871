// Prefetches table rows before a loop reads them.

#ifndef TF_LAYOUTMAP_CORE_BASE_ROW_QUEUE_H_
#define TF_LAYOUTMAP_CORE_BASE_ROW_QUEUE_H_

#include <algorithm>
#include <cstdint>

namespace layoutmap {

// Prefetches the cache lines of a row into the second-level cache. Prefetches
// into the first-level cache would stall, because that cache accepts only a few
// outstanding requests. The stalls would account for a third of the time of a
// large gather.
inline void PrefetchRow(const void* row, int64_t row_bytes) {
  constexpr int64_t kLineBytes = 64;
  // The loop prefetches at most eight cache lines. The hardware prefetcher
  // fetches the remaining lines of a wide row.
  const int64_t bytes = std::min<int64_t>(row_bytes, 8 * kLineBytes);
  for (int64_t b = 0; b < bytes; b += kLineBytes) {
    __builtin_prefetch(static_cast<const char*>(row) + b, /*write=*/0,
                       /*locality=*/2);
  }
}

// A queue that delays the processing of each row until its prefetch is
// complete. The queue calls use(row, other) for a pair after `kSize` more pairs
// were pushed. The calls have the same order as the pushes. The destructor
// calls use(row, other) for the remaining pairs.
template <typename Row, typename Other, typename Use>
class RowQueue {
 public:
  explicit RowQueue(const Use& use) : use_(use) {}
  RowQueue(const RowQueue&) = delete;
  RowQueue& operator=(const RowQueue&) = delete;
  ~RowQueue() {
    const uint64_t waiting = std::min(next_, kSize);
    for (uint64_t k = next_ - waiting; k < next_; ++k) {
      use_(rows_[k % kSize], others_[k % kSize]);
    }
  }

  void Push(Row* row, Other* other) {
    const uint64_t k = next_++ % kSize;
    if (next_ > kSize) use_(rows_[k], others_[k]);
    rows_[k] = row;
    others_[k] = other;
  }

 private:
  static constexpr uint64_t kSize = 32;

  const Use use_;
  uint64_t next_ = 0;
  Row* rows_[kSize];
  Other* others_[kSize];
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_BASE_ROW_QUEUE_H_
