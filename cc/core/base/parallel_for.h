// How the core borrows threads: it owns none.

#ifndef TF_LAYOUTMAP_CORE_BASE_PARALLEL_FOR_H_
#define TF_LAYOUTMAP_CORE_BASE_PARALLEL_FOR_H_

#include <cstdint>
#include <functional>

namespace layoutmap {

// Calls `work(begin, end)` so that the ranges cover [0, total) once, in any
// order, perhaps at the same time, and returns when all are done. `cost` is
// about how many nanoseconds one unit takes: it only sizes the ranges, so no
// result may depend on where they are cut.
using ParallelFor = std::function<void(
    int64_t total, int64_t cost,
    const std::function<void(int64_t begin, int64_t end)>& work)>;

inline void SerialFor(int64_t total, int64_t /*cost*/,
                      const std::function<void(int64_t, int64_t)>& work) {
  if (total > 0) work(0, total);
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_BASE_PARALLEL_FOR_H_
