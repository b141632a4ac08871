// Calls that cannot be carried out yet wait here without holding a thread.
//
// A call is attempted at once, and again after each change that another call
// made, until its attempt says something else than Code::kNotYet; until its
// patience is at an end; or until somebody cancels it:
//
//   Admit -> attempting -> finished
//               |  ^
//         kNotYet  Changed (on a thread of the call's `schedule`)
//               v  |
//              parked -> expired, cancelled
//
// Each call finishes exactly once. No lock is held while a call's own functions
// run. One thread, started by the first call that parks, watches the deadlines.

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
    // `status` is the attempt's; of one that ended otherwise it says what the
    // call was waiting for, or why it was cancelled.
    std::function<void(End end, const Status& status)> finish;
    // Runs its argument, on any thread but this one.
    std::function<void(std::function<void()>)> schedule;
    Clock::duration patience;
  };

  class Ticket;

  PendingCalls();
  ~PendingCalls();
  PendingCalls(const PendingCalls&) = delete;
  PendingCalls& operator=(const PendingCalls&) = delete;

  // A call that can be cancelled from now on; `Start` attempts it.
  std::shared_ptr<Ticket> Admit(Call call);
  void Start(const std::shared_ptr<Ticket>& ticket);
  void Cancel(const std::shared_ptr<Ticket>& ticket, const Status& why);

  // Lets all parked calls try again. Each finished attempt does so itself.
  void Changed();
  // Cancels all calls, also those that come later.
  void Close(const Status& why);

  // The names of the parked calls, in the order in which they came.
  std::vector<std::string> Waiting() const;

 private:
  struct State;
  std::shared_ptr<State> state_;  // outlives this object where calls still run
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_PENDING_CALLS_H_
