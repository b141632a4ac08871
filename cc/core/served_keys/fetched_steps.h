// The steps that a server has sent rows of open vocabularies to, and whose
// gradients it awaits. Their rows are pinned: other keys must not get them.
//
// A row knows the step that used it last, so a step pins its rows by its place
// in the order of steps alone. A step of a closure is awaited until it is
// applied, a later run of the closure takes its place, or the closure's epoch
// is over; one without a closure until kMostOpen more have come. So no worker
// that dies pins a row for ever.

#ifndef TF_LAYOUTMAP_CORE_SERVED_KEYS_FETCHED_STEPS_H_
#define TF_LAYOUTMAP_CORE_SERVED_KEYS_FETCHED_STEPS_H_

#include <cstdint>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/servers/applied_closures.h"

namespace layoutmap {

// A view of the state, which is the caller's and comes from a variable:
//
//   tickets given, steps counted, epoch,
//   then for each step that may be awaited, closures first:
//   ticket (0: none), place in the order of steps, updates when its rows were
//   sent, closure number, attempt
class FetchedSteps {
 public:
  static constexpr int64_t kMostOpen = 256;
  static constexpr int64_t kNumCounts = 3;
  static constexpr int64_t kRecord = 5;
  static constexpr int64_t kNumRecords = AppliedClosures::kWindow + kMostOpen;
  static constexpr int64_t kSize = kNumCounts + kRecord * kNumRecords;

  explicit FetchedSteps(Span<int64_t> state) : state_(state) {}

  // Whether rows were sent to an earlier run of this closure, whose gradients
  // are awaited: then its keys were counted. The token was checked by
  // AppliedClosures, and is none that was applied. Refused if it is this run
  // that has fetched before, or the closure's epoch is over.
  Status Check(const ClosureToken& token, bool* is_repeated) const;

  // Ends what a new epoch ends. After a Check that is ok.
  void Begin(const ClosureToken& token);

  // How many steps ago the oldest one began that is awaited: 0 for none, 1 for
  // the last one.
  int64_t OldestAge() const;
  // The same of the earlier run of a closure.
  int64_t AgeOf(const ClosureToken& token) const;

  // Counts a step whose rows are sent after `num_updates` updates; returns the
  // ticket that it is applied with, 1 or more.
  int64_t Add(const ClosureToken& token, int64_t num_updates);
  // The same of a closure that has come again: its earlier run can no longer
  // be applied, and no step is counted.
  int64_t Renew(const ClosureToken& token, int64_t num_updates);

  // The updates when the rows of a ticket were sent. Refused if it is not
  // awaited.
  Status Find(int64_t ticket, int64_t* num_updates) const;
  // Awaits a ticket no longer; nothing if it is not awaited.
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
