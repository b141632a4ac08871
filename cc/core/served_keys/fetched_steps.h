// The steps for which a server has sent rows of open vocabularies, but has not
// received gradients yet. The rows of these steps are pinned, so that they are
// not assigned to other keys.
//
// Each row stores the step that used it last, so the number of the oldest step
// is sufficient to pin the rows. A step of a closure is pending until it is
// applied, the closure runs again, or the epoch of the closure ends. A step
// without a closure is pending until kMaxOpen later steps without a closure
// have begun. A failed worker therefore does not pin rows permanently.

#ifndef TF_LAYOUTMAP_CORE_SERVED_KEYS_FETCHED_STEPS_H_
#define TF_LAYOUTMAP_CORE_SERVED_KEYS_FETCHED_STEPS_H_

#include <cstdint>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/servers/applied_closures.h"

namespace layoutmap {

// A view of the state, which is owned by the caller and stored in a variable:
//
//   number of tickets, number of steps, epoch,
//   then for each step that may be pending, closures first:
//   ticket (0: none), step number, number of updates when its rows were sent,
//   closure number, attempt
class FetchedSteps {
 public:
  static constexpr int64_t kMaxOpen = 256;
  static constexpr int64_t kNumCounts = 3;
  static constexpr int64_t kRecord = 5;
  static constexpr int64_t kNumRecords = AppliedClosures::kWindow + kMaxOpen;
  static constexpr int64_t kSize = kNumCounts + kRecord * kNumRecords;

  explicit FetchedSteps(Span<int64_t> state) : state_(state) {}

  // Sets `is_repeated` to whether rows were sent to an earlier run of this
  // closure that is still pending. If so, the uses of the keys of the closure
  // are already counted. The token must have been checked by AppliedClosures
  // and must not have been applied. Returns an error if the same run has
  // already fetched, or if the epoch of the closure is over.
  Status Check(const ClosureToken& token, bool* is_repeated) const;

  // Ends all steps of earlier epochs if `token` begins a new epoch. Must be
  // called after a successful `Check`.
  void Begin(const ClosureToken& token);

  // Returns how many steps ago the oldest pending step began: 0 if there is
  // none, 1 for the latest step.
  int64_t OldestAge() const;
  // Returns how many steps ago the earlier run of a closure began.
  int64_t AgeOf(const ClosureToken& token) const;

  // Counts a step whose rows are sent after `num_updates` updates. Returns its
  // ticket, at least 1, which identifies the step when it is applied.
  int64_t Add(const ClosureToken& token, int64_t num_updates);
  // Returns a new ticket for a closure that runs again. The ticket of the
  // earlier run becomes invalid, and no step is counted.
  int64_t Renew(const ClosureToken& token, int64_t num_updates);

  // Returns the number of updates at the time when the rows of a ticket were
  // sent. Returns an error if the step is not pending.
  Status Find(int64_t ticket, int64_t* num_updates) const;
  // Ends the step of a ticket if it is pending.
  void Forget(int64_t ticket);

 private:
  int64_t* record(int64_t i) const {
    return state_.data() + kNumCounts + kRecord * i;
  }
  int64_t* RecordOf(const ClosureToken& token) const;
  int64_t* RecordOfTicket(int64_t ticket) const;

  Span<int64_t> state_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVED_KEYS_FETCHED_STEPS_H_
