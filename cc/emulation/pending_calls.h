// Calls that cannot complete yet and wait without blocking a thread.
//
// A call is attempted immediately, and again after each change by another call.
// It ends when its attempt returns something other than Code::kNotYet, when its
// deadline expires, or when it is cancelled:
//
//   Admit -> attempting -> finished
//               |  ^
//         kNotYet  Changed (on a thread of the call's `schedule`)
//               v  |
//              parked -> expired, cancelled
//
// Each call finishes exactly once. No lock is held while a call's functions
// run. One thread, started by the first call that parks, checks the deadlines.

#ifndef TF_LAYOUTMAP_EMULATION_PENDING_CALLS_H_
#define TF_LAYOUTMAP_EMULATION_PENDING_CALLS_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cc/core/base/status.h"

namespace layoutmap {

class PendingCalls {
 public:
  using Clock = std::chrono::steady_clock;

  enum class End { kAttempted, kExpired, kCancelled };

  struct Call {
    std::string name;  // for `Waiting`
    std::function<Status()> attempt;
    // `status` is the result of the attempt. If the call ended otherwise,
    // `status` contains the condition that it waited for, or the reason of the
    // cancellation.
    std::function<void(End end, const Status& status)> finish;
    // Runs its argument on another thread.
    std::function<void(std::function<void()>)> schedule;
    Clock::duration patience;
  };

  class Ticket;

  PendingCalls();
  ~PendingCalls();
  PendingCalls(const PendingCalls&) = delete;
  PendingCalls& operator=(const PendingCalls&) = delete;

  // Registers a call, which can be cancelled from now on. `Start` attempts it.
  std::shared_ptr<Ticket> Admit(Call call);
  void Start(const std::shared_ptr<Ticket>& ticket);
  void Cancel(const std::shared_ptr<Ticket>& ticket, const Status& why);

  // Attempts all parked calls again. Each finished attempt calls this method.
  void Changed();
  // Cancels all calls, including later ones.
  void Close(const Status& why);

  // Returns the names of the parked calls in the order of arrival.
  std::vector<std::string> Waiting() const;

 private:
  struct State;
  std::shared_ptr<State> state_;  // outlives this object if calls still run
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_PENDING_CALLS_H_
