// Records the steps for which a server has sent rows of open vocabularies, but
// has not received gradients yet. The rows of these pending steps are pinned,
// so that the server does not assign them to other keys.
//
// Each row stores the number of the last step that used it, so the number of
// the oldest pending step is sufficient to pin the rows. A step of a closure is
// pending until one of three events: the step is applied, the closure runs
// again, or the epoch of the closure ends. A step without a closure is pending
// until it is applied, or until kMaxOpen later steps without a closure have
// begun. Therefore, a worker that fails does not pin rows permanently.
//
// A step can look up keys several times, for example if a model calls a layer
// several times. The lookups of a step have consecutive numbers, see
// `ClosureToken::call`. They share a record, so the rows of all lookups are
// pinned until the step ends. If the closure runs again, the server counts the
// keys of a lookup only if no earlier run has counted the keys of this lookup.

#ifndef TF_LAYOUTMAP_CORE_SERVED_KEYS_FETCHED_STEPS_H_
#define TF_LAYOUTMAP_CORE_SERVED_KEYS_FETCHED_STEPS_H_

#include <cstdint>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/servers/applied_closures.h"

namespace layoutmap {

// A view of the state. The caller owns the state and stores it in a variable,
// with these values:
//
//   * The number of tickets, the number of steps, and the epoch.
//   * Seven values for each record of a step, with the records of closures
//     first: the ticket, or 0 without a pending step, the step number of the
//     first lookup, the number of updates before the rows were sent, the
//     closure number, the attempt, the number of lookups whose keys are
//     counted, and the number of lookups of this attempt.
class FetchedSteps {
 public:
  static constexpr int64_t kMaxOpen = 256;
  static constexpr int64_t kNumCounts = 3;
  static constexpr int64_t kRecord = 7;
  static constexpr int64_t kNumRecords = AppliedClosures::kWindow + kMaxOpen;
  static constexpr int64_t kSize = kNumCounts + kRecord * kNumRecords;

  explicit FetchedSteps(Span<int64_t> state) : state_(state) {}

  // Sets `is_repeated` to true if rows were sent to the same lookup of an
  // earlier run of this closure and that step is still pending. In this case,
  // the uses of the lookup's keys are already counted. AppliedClosures must
  // have checked the token and must not have applied it. Returns an error if
  // the same run of the closure has already fetched the rows of this lookup, if
  // an earlier lookup of the step is missing, or if the epoch of the closure is
  // over.
  Status Check(const ClosureToken& token, bool* is_repeated) const;

  // If `token` begins a new epoch, ends all steps of earlier epochs. Call this
  // function after `Check` has succeeded.
  void Begin(const ClosureToken& token);

  // Returns how many steps ago the oldest pending step began. The result is 1
  // for the latest step, and 0 if no step is pending.
  int64_t OldestAge() const;
  // Returns how many steps ago the step of a closure's earlier run began.
  int64_t AgeOf(const ClosureToken& token) const;

  // Adds a lookup whose rows are sent after `num_updates` updates. The first
  // lookup of a step adds the step. Returns the ticket of the step, which is at
  // least 1. The ticket identifies the step in the `apply` message.
  int64_t Add(const ClosureToken& token, int64_t num_updates);
  // Returns the ticket for a lookup of a closure that runs again. The first
  // lookup creates a new ticket, and the ticket of the earlier run becomes
  // invalid. The number of steps does not change.
  int64_t Renew(const ClosureToken& token, int64_t num_updates);

  // Sets `num_updates` to the number of updates before the rows of the ticket's
  // step were sent. Returns an error if the step is not pending.
  Status Find(int64_t ticket, int64_t* num_updates) const;
  // Ends the step that belongs to a ticket if the step is pending.
  void Forget(int64_t ticket);

 private:
  int64_t* record(int64_t i) const {
    return state_.data() + kNumCounts + kRecord * i;
  }
  // Returns the record of the step, or nullptr. The first lookup of a step
  // without a closure has no record.
  int64_t* RecordOf(const ClosureToken& token) const;
  int64_t* RecordOfTicket(int64_t ticket) const;

  Span<int64_t> state_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVED_KEYS_FETCHED_STEPS_H_
