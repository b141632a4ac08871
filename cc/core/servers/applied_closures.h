// Which closures a server has applied, so that each counts once.
//
// A coordinator runs a closure again whose worker has died, and nobody knows
// how far the first run came. So a closure has a token, and a server remembers
// the tokens whose gradients are in its tables.

#ifndef TF_LAYOUTMAP_CORE_SERVERS_APPLIED_CLOSURES_H_
#define TF_LAYOUTMAP_CORE_SERVERS_APPLIED_CLOSURES_H_

#include <cstdint>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"

namespace layoutmap {

struct ClosureToken {
  int64_t epoch = 0;    // grows whenever numbers start at 0 again
  int64_t number = -1;  // below 0: no token; whatever comes is applied
  int64_t attempt = 0;  // of this run of the closure; 0: not known

  bool has_number() const { return number >= 0; }
};

// A view of the state, which is the caller's and comes from a variable:
//
//   epoch, base, num_updates, sum and maximum of staleness, num_repeated,
//   then for each of the last `kWindow` numbers: number + 1, attempt
//
// All numbers below `base` are applied, and of those from it on the ones that
// the window has. Zeros are a server that has applied nothing.
class AppliedClosures {
 public:
  static constexpr int64_t kWindow = 1024;
  static constexpr int64_t kNumCounts = 6;
  static constexpr int64_t kSize = kNumCounts + 2 * kWindow;

  explicit AppliedClosures(Span<int64_t> state) : state_(state) {}

  // Updates so far, of closures with and without a token.
  static int64_t NumUpdates(Span<const int64_t> state) { return state[2]; }
  int64_t num_updates() const { return state_[2]; }

  // Whether the gradients of a token are in the tables already. Refused if its
  // epoch is over, if this run of the closure has applied before, or if the
  // window does not reach from the oldest number that is missing to this one.
  Status Check(const ClosureToken& token, bool* is_repeated) const;

  // Notes, after a Check that is ok, that a closure came again.
  void Repeat() { ++state_[5]; }

  // Notes, after a Check that found it new, that a closure was applied, whose
  // rows were read when there were `version` updates.
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
