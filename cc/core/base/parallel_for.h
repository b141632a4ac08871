// The interface through which the core runs loops on the threads of its caller.
// The core does not create threads.

#ifndef TF_LAYOUTMAP_CORE_BASE_PARALLEL_FOR_H_
#define TF_LAYOUTMAP_CORE_BASE_PARALLEL_FOR_H_

#include <cstdint>
#include <functional>

namespace layoutmap {

// Calls `work(begin, end)` with ranges that cover [0, total) once, in any order
// and possibly in parallel. Returns when all calls are done. `cost` is the
// approximate number of nanoseconds per unit, and only affects the sizes of the
// ranges. The results of `work` must not depend on how [0, total) is split into
// ranges.
using ParallelFor = std::function<void(
    int64_t total, int64_t cost,
    const std::function<void(int64_t begin, int64_t end)>& work)>;

inline void SerialFor(int64_t total, int64_t /*cost*/,
                      const std::function<void(int64_t, int64_t)>& work) {
  if (total > 0) work(0, total);
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_BASE_PARALLEL_FOR_H_
