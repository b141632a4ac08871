#include "cc/core/served_keys/fetched_steps.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "cc/core/base/status.h"
#include "cc/core/servers/applied_closures.h"

namespace layoutmap {

using std::to_string;

namespace {

enum Count { kTickets, kSteps, kEpoch };
enum Field {
  kTicket,
  kStep,
  kNumUpdates,
  kNumber,
  kAttempt,
  kCountedCalls,
  kCallsOfAttempt
};

// The largest valid number in the state, which is small enough that sums cannot
// overflow.
constexpr int64_t kMaxCount = int64_t{1} << 60;

}  // namespace

int64_t* FetchedSteps::RecordOf(const ClosureToken& token) const {
  if (!token.has_number()) {
    return token.call > 0 ? RecordOfTicket(token.attempt) : nullptr;
  }
  int64_t* const found = record(token.number % AppliedClosures::kWindow);
  return state_[kEpoch] == token.epoch && found[kTicket] > 0 &&
                 found[kNumber] == token.number
             ? found
             : nullptr;
}

int64_t* FetchedSteps::RecordOfTicket(int64_t ticket) const {
  for (int64_t i = 0; ticket > 0 && i < kNumRecords; ++i) {
    if (record(i)[kTicket] == ticket) return record(i);
  }
  return nullptr;
}

Status FetchedSteps::Check(const ClosureToken& token, bool* is_repeated) const {
  *is_repeated = false;
  for (int64_t i = 0; i < kNumCounts; ++i) {
    if (state_[i] >= 0 && state_[i] <= kMaxCount) continue;
    return InvalidArgument(
        "The state of fetched steps must start as zeros. Received: " +
        to_string(state_[i]) + " at index " + to_string(i));
  }
  if (token.has_number() && token.epoch < state_[kEpoch]) {
    return FailedPrecondition(
        "Closure " + to_string(token.number) + " of epoch " +
        to_string(token.epoch) + " arrived after epoch " +
        to_string(state_[kEpoch]) + " has begun, so it was discarded");
  }
  const int64_t* const earlier = RecordOf(token);
  // The number of lookups of this run so far.
  int64_t num_calls = 0;
  if (earlier != nullptr) {
    // If the run is not known, each lookup can be a lookup of this run.
    if (token.has_number() && token.attempt == 0) {
      num_calls = std::min(token.call, earlier[kCountedCalls]);
    } else if (!token.has_number() || earlier[kAttempt] == token.attempt) {
      num_calls = earlier[kCallsOfAttempt];
    }
    *is_repeated = token.call < earlier[kCountedCalls];
  }
  if (token.call == num_calls) return Status();
  if (token.call < num_calls) {
    return FailedPrecondition(
        "Closure " + to_string(token.number) + " has already sent lookup " +
        to_string(token.call) +
        " of keys of this embedding in a training step, and may send each "
        "lookup only once. Call `enqueue` once per step, and call layers "
        "outside of `tf.while_loop` and `tf.cond`");
  }
  return FailedPrecondition(
      "Lookup " + to_string(token.call) +
      " of keys in a training step must follow the earlier lookups of the same "
      "step. Received: a lookup after " +
      to_string(num_calls) +
      " lookups. The closure has run again or was discarded, or " +
      to_string(kMaxOpen) + " steps without a closure have begun since");
}

void FetchedSteps::Begin(const ClosureToken& token) {
  if (!token.has_number() || token.epoch <= state_[kEpoch]) return;
  state_[kEpoch] = token.epoch;
  for (int64_t i = 0; i < AppliedClosures::kWindow; ++i) record(i)[kTicket] = 0;
}

int64_t FetchedSteps::OldestAge() const {
  int64_t oldest = state_[kSteps] + 1;
  for (int64_t i = 0; i < kNumRecords; ++i) {
    if (record(i)[kTicket] > 0) oldest = std::min(oldest, record(i)[kStep]);
  }
  return state_[kSteps] + 1 - std::max<int64_t>(oldest, 0);
}

int64_t FetchedSteps::AgeOf(const ClosureToken& token) const {
  const int64_t* const found = RecordOf(token);
  return found == nullptr
             ? 0
             : state_[kSteps] + 1 - std::max<int64_t>(found[kStep], 0);
}

int64_t FetchedSteps::Add(const ClosureToken& token, int64_t num_updates) {
  const int64_t step = ++state_[kSteps];
  if (token.call > 0) {
    int64_t* const found = RecordOf(token);
    found[kCountedCalls] = token.call + 1;
    found[kCallsOfAttempt] = token.call + 1;
    return found[kTicket];
  }
  const int64_t ticket = ++state_[kTickets];
  int64_t* const made =
      record(token.has_number() ? token.number % AppliedClosures::kWindow
                                : AppliedClosures::kWindow + ticket % kMaxOpen);
  made[kTicket] = ticket;
  made[kStep] = step;
  made[kNumUpdates] = num_updates;
  made[kNumber] = token.number;
  made[kAttempt] = token.attempt;
  made[kCountedCalls] = 1;
  made[kCallsOfAttempt] = 1;
  return ticket;
}

int64_t FetchedSteps::Renew(const ClosureToken& token, int64_t num_updates) {
  int64_t* const found = RecordOf(token);
  found[kCallsOfAttempt] = token.call + 1;
  if (token.call > 0) return found[kTicket];
  found[kTicket] = ++state_[kTickets];
  found[kNumUpdates] = num_updates;
  found[kAttempt] = token.attempt;
  return found[kTicket];
}

Status FetchedSteps::Find(int64_t ticket, int64_t* num_updates) const {
  const int64_t* const found = RecordOfTicket(ticket);
  if (found != nullptr) {
    *num_updates = found[kNumUpdates];
    return Status();
  }
  return FailedPrecondition(
      "The gradients of this step arrived too late: its rows may belong to "
      "other keys now. Its closure has run again or was discarded, or " +
      to_string(kMaxOpen) +
      " steps without a closure have begun since. Nothing was applied");
}

void FetchedSteps::Forget(int64_t ticket) {
  if (int64_t* const found = RecordOfTicket(ticket)) found[kTicket] = 0;
}

}  // namespace layoutmap
