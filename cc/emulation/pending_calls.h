// Manages calls that cannot complete yet. The calls wait without blocking a
// thread.
//
// A call is attempted immediately, and again each time another call has changed
// the state. The call ends in one of three cases: the result of an attempt is
// not Code::kNotYet, the deadline of the call expires, or the call is
// cancelled.
//
//   Admit -> attempting -> finished
//               |  ^
//         kNotYet  Changed (on a thread of the call's `schedule`)
//               v  |
//              parked -> expired, cancelled
//
// Each call finishes exactly once. No lock is held while the functions of a
// call run. One thread, which is started when the first call parks, checks the
// deadlines.

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
    // The name that `Waiting` returns.
    std::string name;
    std::function<Status()> attempt;
    // Function that is called at the end of the call. If an attempt ended the
    // call, `status` is the result of the attempt. If the deadline expired,
    // `status` contains the condition that the call waited for. If the call was
    // cancelled, `status` contains the reason.
    std::function<void(End end, const Status& status)> finish;
    // Function that runs its argument on another thread.
    std::function<void(std::function<void()>)> schedule;
    Clock::duration patience;
  };

  class Ticket;

  PendingCalls();
  ~PendingCalls();
  PendingCalls(const PendingCalls&) = delete;
  PendingCalls& operator=(const PendingCalls&) = delete;

  // Registers a call, which can be cancelled from then on. `Start` runs the
  // first attempt.
  std::shared_ptr<Ticket> Admit(Call call);
  void Start(const std::shared_ptr<Ticket>& ticket);
  void Cancel(const std::shared_ptr<Ticket>& ticket, const Status& why);

  // Schedules another attempt of all parked calls. This method is called each
  // time a call ends.
  void Changed();
  // Cancels all calls, including later ones.
  void Close(const Status& why);

  // Returns the names of the parked calls in the order of their arrival.
  std::vector<std::string> Waiting() const;

 private:
  struct State;
  // The state outlives this object if calls are still running.
  std::shared_ptr<State> state_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_PENDING_CALLS_H_
