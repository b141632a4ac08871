// Records which closures a server has applied, so that each closure is applied
// once.
//
// If a worker fails, the coordinator runs its closure again, and it is not
// known which servers have already applied the first run. Each closure
// therefore has a token, and each server records the tokens whose gradients it
// has applied.

#ifndef TF_LAYOUTMAP_CORE_SERVERS_APPLIED_CLOSURES_H_
#define TF_LAYOUTMAP_CORE_SERVERS_APPLIED_CLOSURES_H_

#include <cstdint>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"

namespace layoutmap {

struct ClosureToken {
  int64_t epoch = 0;    // increases whenever numbers restart at 0
  int64_t number = -1;  // below 0: no token; the closure is always applied
  int64_t attempt = 0;  // identifies this run of the closure; 0: unknown

  bool has_number() const { return number >= 0; }
};

// A view of the state, which is owned by the caller and stored in a variable:
//
//   epoch, base, num_updates, sum and maximum of staleness, num_repeated,
//   then for each of the last `kWindow` numbers: number + 1, attempt
//
// All closures with numbers below `base` are applied. A closure with a higher
// number is applied if the state contains its number. An initial state of zeros
// means that no closure is applied.
class AppliedClosures {
 public:
  static constexpr int64_t kWindow = 1024;
  static constexpr int64_t kNumCounts = 6;
  static constexpr int64_t kSize = kNumCounts + 2 * kWindow;

  explicit AppliedClosures(Span<int64_t> state) : state_(state) {}

  // Returns the number of updates by closures with and without a token.
  static int64_t NumUpdates(Span<const int64_t> state) { return state[2]; }
  int64_t num_updates() const { return state_[2]; }

  // Sets `is_repeated` to whether the gradients of a token are already applied.
  // Returns an error if its epoch is over, if this run of the closure has
  // already applied gradients, or if the number is outside the window that
  // starts at the lowest number that is not applied.
  Status Check(const ClosureToken& token, bool* is_repeated) const;

  // Records a repeated closure, after a successful `Check`.
  void Repeat() { ++state_[5]; }

  // Records that a closure was applied, after `Check` found a new token.
  // `version` is the number of updates at the time when its rows were read.
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
