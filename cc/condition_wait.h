#ifndef TF_LAYOUTMAP_CC_CONDITION_WAIT_H_
#define TF_LAYOUTMAP_CC_CONDITION_WAIT_H_

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace layoutmap {

// `condition.wait(lock)`, for systems with an older libstdc++ too.
//
// GCC 12 gave `wait` a new version (GLIBCXX_3.4.30): by that one symbol a wheel
// would need glibc 2.35. `wait_until` is in the header, over a function of
// glibc 2.34.
inline void WaitOn(std::condition_variable& condition,
                   std::unique_lock<std::mutex>& lock) {
  condition.wait_until(lock, std::chrono::steady_clock::time_point::max());
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CC_CONDITION_WAIT_H_
