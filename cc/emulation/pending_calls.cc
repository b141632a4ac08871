#include "cc/emulation/pending_calls.h"

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cc/condition_wait.h"
#include "cc/core/base/status.h"

namespace layoutmap {

class PendingCalls::Ticket {
 public:
  Ticket(Call c, Clock::time_point d) : call(std::move(c)), deadline(d) {}

  Call call;
  const Clock::time_point deadline;
  // The mutex of `State` guards the following members.
  bool is_parked = false;
  bool is_finished = false;
  bool is_cancelled = false;
  // The reason for the cancellation, or the condition that the call waits for.
  Status why;
};

struct PendingCalls::State : std::enable_shared_from_this<State> {
  using TicketPtr = std::shared_ptr<Ticket>;

  mutable std::mutex mutex;
  std::condition_variable deadlines_changed;
  // The parked calls in the order of their arrival.
  std::list<TicketPtr> parked;
  int64_t num_changes = 0;
  bool is_closed = false;
  Status why_closed;
  bool is_watched = false;
  // Set if PendingCalls was deleted. `Watch` must then return.
  bool is_abandoned = false;

  void Attempt(const TicketPtr& ticket);
  void Changed();
  // Removes a parked call that ends. The caller must hold the mutex, and must
  // release it before it calls `finish`.
  void Unpark(const TicketPtr& ticket) {
    parked.remove(ticket);
    ticket->is_parked = false;
    ticket->is_finished = true;
  }
  void Watch();
};

void PendingCalls::State::Attempt(const TicketPtr& ticket) {
  for (;;) {
    int64_t num_changes_before;
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (is_closed && !ticket->is_cancelled) {
        ticket->is_cancelled = true;
        ticket->why = why_closed;
      }
      if (ticket->is_cancelled) {
        ticket->is_finished = true;
        break;
      }
      num_changes_before = num_changes;
    }
    const Status status = ticket->call.attempt();
    {
      std::unique_lock<std::mutex> lock(mutex);
      if (status.code() != Code::kNotYet) {
        ticket->is_finished = true;
        lock.unlock();
        // `finish` is called before `Changed`, so that an error of this call is
        // reported before the errors that it causes in other calls.
        ticket->call.finish(End::kAttempted, status);
        Changed();
        return;
      }
      // If the state has changed during the attempt, the attempt is repeated.
      if (ticket->is_cancelled || is_closed ||
          num_changes != num_changes_before) {
        continue;
      }
      ticket->why = status;
      ticket->is_parked = true;
      parked.push_back(ticket);
      if (!is_watched) {
        is_watched = true;
        std::thread([state = shared_from_this()] { state->Watch(); }).detach();
      }
      deadlines_changed.notify_one();
      return;
    }
  }
  ticket->call.finish(End::kCancelled, ticket->why);
  Changed();
}

void PendingCalls::State::Changed() {
  std::list<TicketPtr> released;
  {
    std::lock_guard<std::mutex> lock(mutex);
    ++num_changes;
    released.swap(parked);
    for (const TicketPtr& ticket : released) ticket->is_parked = false;
  }
  for (const TicketPtr& ticket : released) {
    ticket->call.schedule(
        [state = shared_from_this(), ticket] { state->Attempt(ticket); });
  }
}

void PendingCalls::State::Watch() {
  const auto is_earlier = [](const TicketPtr& a, const TicketPtr& b) {
    return a->deadline < b->deadline;
  };
  std::unique_lock<std::mutex> lock(mutex);
  while (!is_abandoned) {
    const auto next =
        std::min_element(parked.begin(), parked.end(), is_earlier);
    if (next == parked.end()) {
      WaitOn(deadlines_changed, lock);
      continue;
    }
    // The loop must not have a reference to a call while it waits. The call may
    // end during the wait, and the reference would keep its resources alive.
    // The loop would then release the last reference while it holds the mutex,
    // and could destroy this object.
    const Clock::time_point deadline = (*next)->deadline;
    if (deadline > Clock::now()) {
      deadlines_changed.wait_until(lock, deadline);
      continue;
    }
    TicketPtr expired = *next;
    Unpark(expired);
    lock.unlock();
    expired->call.finish(End::kExpired, expired->why);
    Changed();
    expired.reset();
    lock.lock();
  }
}

PendingCalls::PendingCalls() : state_(std::make_shared<State>()) {}

PendingCalls::~PendingCalls() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->is_abandoned = true;
  state_->deadlines_changed.notify_one();
}

std::shared_ptr<PendingCalls::Ticket> PendingCalls::Admit(Call call) {
  const Clock::time_point deadline = Clock::now() + call.patience;
  return std::make_shared<Ticket>(std::move(call), deadline);
}

void PendingCalls::Start(const std::shared_ptr<Ticket>& ticket) {
  // The call may release the last reference to this PendingCalls object, so the
  // code keeps a reference to the state.
  const std::shared_ptr<State> state = state_;
  state->Attempt(ticket);
}

void PendingCalls::Cancel(const std::shared_ptr<Ticket>& ticket,
                          const Status& why) {
  const std::shared_ptr<State> state = state_;
  {
    std::lock_guard<std::mutex> lock(state->mutex);
    if (ticket->is_finished || ticket->is_cancelled) return;
    ticket->is_cancelled = true;
    ticket->why = why;
    // The running attempt reads the flag.
    if (!ticket->is_parked) return;
    state->Unpark(ticket);
  }
  ticket->call.finish(End::kCancelled, why);
  state->Changed();
}

void PendingCalls::Changed() {
  const std::shared_ptr<State> state = state_;
  state->Changed();
}

void PendingCalls::Close(const Status& why) {
  const std::shared_ptr<State> state = state_;
  {
    std::lock_guard<std::mutex> lock(state->mutex);
    state->is_closed = true;
    state->why_closed = why;
  }
  state->Changed();
}

std::vector<std::string> PendingCalls::Waiting() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  std::vector<std::string> names;
  for (const std::shared_ptr<Ticket>& ticket : state_->parked) {
    names.push_back(ticket->call.name);
  }
  return names;
}

}  // namespace layoutmap
