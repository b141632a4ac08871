// Records which closures a server has applied, so that the server applies each
// closure once.
//
// If a worker fails, the coordinator runs its closure again. The coordinator
// does not know which servers have already applied the gradients of the first
// run. Therefore, each closure has a token, and each server records the tokens
// whose gradients it has applied.

#ifndef TF_LAYOUTMAP_CORE_SERVERS_APPLIED_CLOSURES_H_
#define TF_LAYOUTMAP_CORE_SERVERS_APPLIED_CLOSURES_H_

#include <cstdint>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"

namespace layoutmap {

struct ClosureToken {
  // The epoch increases whenever the closure numbers restart at 0.
  int64_t epoch = 0;
  // Number of the closure. If negative, there is no token, and the gradients
  // are always applied.
  int64_t number = -1;
  // Identifies this run of the closure. If 0, the run is not known. For the
  // second and later lookups of a step without a closure, the ticket of the
  // step.
  int64_t attempt = 0;
  // Index of a lookup of keys among the lookups of the closure's step. Only
  // `FetchedSteps` uses the index.
  int64_t call = 0;

  bool has_number() const { return number >= 0; }
};

// A view of the state. The caller owns the state and stores it in a variable,
// with these values:
//
//   * The epoch, base, num_updates, the sum and the maximum of the staleness,
//     and num_repeated.
//   * Two values for each of the last `kWindow` closure numbers: the number
//     plus 1, and the attempt.
//
// All closures with numbers below `base` were applied. A closure with a higher
// number was applied if the state contains its number. In the initial state,
// all values are zero, and no closure was applied.
class AppliedClosures {
 public:
  static constexpr int64_t kWindow = 1024;
  static constexpr int64_t kNumCounts = 6;
  static constexpr int64_t kSize = kNumCounts + 2 * kWindow;

  explicit AppliedClosures(Span<int64_t> state) : state_(state) {}

  // These functions return the number of applied updates, including updates
  // without a token.
  static int64_t NumUpdates(Span<const int64_t> state) { return state[2]; }
  int64_t num_updates() const { return state_[2]; }

  // Sets `is_repeated` to true if the gradients of a token were already
  // applied. Returns an error in these cases: the epoch of the token is over,
  // the same run of the closure has already applied gradients, or the number is
  // beyond the window. The window starts at the lowest number that was not
  // applied.
  Status Check(const ClosureToken& token, bool* is_repeated) const;

  // Counts a repeated closure. Call this function after a successful `Check`.
  void Repeat() { ++state_[5]; }

  // Records that a closure was applied. `Check` must have set `is_repeated` to
  // false. `version` is the number of updates before the closure read its rows.
  void Apply(const ClosureToken& token, int64_t version);

 private:
  int64_t& number_at(int64_t number) const {
    return state_[kNumCounts + 2 * (number % kWindow)];
  }
  int64_t& attempt_at(int64_t number) const {
    return state_[kNumCounts + 2 * (number % kWindow) + 1];
  }
  bool Has(int64_t number) const { return number_at(number) == number + 1; }

  Span<int64_t> state_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVERS_APPLIED_CLOSURES_H_
