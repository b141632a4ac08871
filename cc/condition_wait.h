#ifndef TF_LAYOUTMAP_CC_CONDITION_WAIT_H_
#define TF_LAYOUTMAP_CC_CONDITION_WAIT_H_

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace layoutmap {

// Equivalent to `condition.wait(lock)`, but compatible with older versions of
// libstdc++.
//
// GCC 12 gave `wait` a new symbol version (GLIBCXX_3.4.30), which a manylinux
// wheel must not require. This function calls `wait_until` instead, a template
// that the header defines.
inline void WaitOn(std::condition_variable& condition,
                   std::unique_lock<std::mutex>& lock) {
  condition.wait_until(lock, std::chrono::steady_clock::time_point::max());
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CC_CONDITION_WAIT_H_
