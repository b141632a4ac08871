#include "cc/core/servers/applied_closures.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "cc/core/base/status.h"

namespace layoutmap {

using std::to_string;

namespace {

// The largest valid number in the state, which is small enough that sums cannot
// overflow.
constexpr int64_t kMaxNumber = int64_t{1} << 60;

}  // namespace

Status AppliedClosures::Check(const ClosureToken& token,
                              bool* is_repeated) const {
  *is_repeated = false;
  for (int64_t i = 0; i < kNumCounts; ++i) {
    if (state_[i] >= 0 && state_[i] <= kMaxNumber) continue;
    return InvalidArgument(
        "The state of applied closures must start as zeros. Received: " +
        to_string(state_[i]) + " at index " + to_string(i));
  }
  if (!token.has_number()) return Status();
  const int64_t epoch = state_[0], base = state_[1];
  if (token.epoch < 1 || token.epoch > kMaxNumber ||
      token.number > kMaxNumber) {
    return InvalidArgument(
        "The token of a closure must have an epoch in [1, 2^60] and a number "
        "in [0, 2^60]. Received: epoch " +
        to_string(token.epoch) + ", number " + to_string(token.number));
  }
  if (token.epoch < epoch) {
    return FailedPrecondition(
        "Closure " + to_string(token.number) + " of epoch " +
        to_string(token.epoch) + " arrived after epoch " + to_string(epoch) +
        " has begun, so it was discarded and is not applied");
  }
  const bool is_new_epoch = token.epoch > epoch;
  const int64_t first = is_new_epoch ? 0 : base;
  if (token.number >= first + kWindow) {
    return FailedPrecondition(
        "Closure " + to_string(token.number) + " arrived before closure " +
        to_string(first) + " was applied: at most " + to_string(kWindow) +
        " closures may be in flight. Schedule fewer closures at a time");
  }
  if (is_new_epoch) return Status();
  if (Has(token.number)) {
    *is_repeated = true;
    if (token.attempt != 0 && attempt_at(token.number) == token.attempt) {
      return FailedPrecondition(
          "Closure " + to_string(token.number) +
          " has already applied gradients of this embedding, and may do so "
          "only once. Use one batch per step, and run more steps");
    }
  } else {
    *is_repeated = token.number < base;
  }
  return Status();
}

void AppliedClosures::Apply(const ClosureToken& token, int64_t version) {
  // The version is an input that was not checked. If it is out of range, the
  // staleness counts as 0.
  const bool is_known = version >= 0 && version <= num_updates();
  const int64_t staleness = is_known ? num_updates() - version : 0;
  state_[3] += staleness;
  state_[4] = std::max(state_[4], staleness);
  ++state_[2];
  if (!token.has_number()) return;
  if (token.epoch > state_[0]) {
    state_[0] = token.epoch;
    state_[1] = 0;
    std::fill(state_.begin() + kNumCounts, state_.end(), 0);
  }
  number_at(token.number) = token.number + 1;
  attempt_at(token.number) = token.attempt;
  while (Has(state_[1])) ++state_[1];
}

}  // namespace layoutmap
