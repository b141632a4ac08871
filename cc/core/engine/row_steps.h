// Stores lookups of keys whose gradients the caller holds. The gradients of
// TokenSteps are stored by the engine instead. A step consists of these calls:
//
// - `Open` stores a lookup, which may never get a gradient.
// - `Mark` marks a lookup whose gradient is being computed.
// - `Record` stores the rows of the gradient of all marked lookups.
// - `BeginApply` finds the records of a gradient that an optimizer applies.
//
// The caller may apply any operation to a gradient between `Record` and
// `BeginApply`. The rows of a lookup stay assigned to their keys until the
// gradient is applied or discarded. `BeginApply` finds the lookups of a
// gradient by the memory of its rows. If the caller has computed new rows, for
// example because it added several gradients, `BeginApply` compares the rows
// with the rows of all recorded gradients.
//
// An applied gradient can be applied again, and an applied lookup can get
// another gradient, until the next lookup or until `VisitInFlight`, after which
// the rows may be assigned to other keys.

#ifndef TF_LAYOUTMAP_CORE_ENGINE_ROW_STEPS_H_
#define TF_LAYOUTMAP_CORE_ENGINE_ROW_STEPS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/engine/expiry.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/steps/step.h"

namespace layoutmap {

class RowSteps {
 public:
  // Maximum number of open lookups, and maximum number of recorded gradients
  // that wait for an update.
  static constexpr int64_t kMaxOpen = 64;
  // An update of a lookup discards all lookups that are more than `kKeptBehind`
  // lookups older, and their gradients.
  static constexpr int64_t kKeptBehind = 8;

  // The rows of a recorded gradient.
  struct RecordedRows {
    Span<const int64_t> rows;
    // Owns the memory of `rows`. Returns whether another object uses this
    // memory, too.
    std::function<bool()> is_shared;
  };

  // A gradient of the table.
  struct Gradient {
    // The row of each gradient row. If `is_dense`, all rows of the table.
    Span<const int64_t> rows;
    // [rows.size(), dim].
    Span<const float> values;
    bool is_dense = false;
  };

  // The lookups and updates are added to the counts of `engine`, which must
  // outlive this object and have one table and one replica.
  explicit RowSteps(HostEngine* engine) : engine_(engine) {}

  // Stores a checked batch and returns its token, which is larger than all
  // earlier tokens.
  Status Open(std::shared_ptr<const Batch> batch, int64_t* token);

  // Removes the newest lookup, as if it had not been opened. Returns an error
  // if a newer lookup was opened, or if an update has discarded this lookup.
  Status TakeBack(int64_t token);

  // Marks a lookup whose gradient is being computed.
  Status Mark(int64_t token);

  // Stores the rows of the gradient of all lookups that were marked since the
  // last call.
  void Record(RecordedRows rows);

  // Finds the records that a gradient was computed from. If the gradient was
  // applied already, or if rows that it contains may belong to other keys by
  // now, returns an error. The caller must then run the update and call
  // `FinishApply`.
  Status BeginApply(const Gradient& gradient, std::vector<int64_t>* records);
  void FinishApply(const std::vector<int64_t>& records,
                   const std::vector<TableStep>& tables, bool updated);

  // Calls `visit(batch)` for the batches of all lookups whose rows must stay
  // assigned to their keys. The caller may assign all other rows to other keys.
  // Applied lookups are therefore discarded. The rows of a running update stay
  // assigned to their keys.
  void VisitInFlight(const std::function<void(const Batch&)>& visit) const;

  // Discards all lookups and gradients.
  void Reset();

  // Returns whether an update is running.
  bool IsApplying() const;
  // These functions return the number of open lookups, and the number of
  // gradients that wait for an update.
  int64_t NumOpen() const;
  int64_t NumRecorded() const;

 private:
  using Lookups = std::map<int64_t, std::shared_ptr<const Batch>>;

  struct RecordedGradient {
    RecordedRows rows;
    // The lookups of the gradient, by token. Empty after the gradient was
    // applied or discarded.
    Lookups lookups;
    bool is_waiting = true;
    // Why the gradient does not wait any more.
    Expiry expiry = Expiry::kApplied;
  };

  Status FindLocked(int64_t token, std::shared_ptr<const Batch>* batch) const;
  Status Expired(const std::string& what, Expiry expiry) const;
  Expiry WhyExpired(int64_t token) const;
  // Sets `is_changed` if the memory of the rows belongs to no record.
  Status FindRecords(const Gradient& gradient, std::vector<int64_t>* records,
                     bool* is_changed) const;
  // Returns the lookups of a gradient that waits or can be applied again.
  const Lookups& LookupsOf(int64_t number) const;
  // Stops the wait of a gradient for its update.
  void Finish(RecordedGradient* record, Expiry expiry);
  void DiscardApplied() const;
  // Removes records whose rows no other object uses any more.
  void RemoveUnused();

  HostEngine* const engine_;
  // Guards the members below.
  mutable std::mutex mutex_;
  int64_t next_token_ = 1;
  Lookups open_;
  Lookups marked_;
  int64_t next_record_ = 0;
  std::map<int64_t, RecordedGradient> records_;
  // Lookups, and lookups of the newest `kMaxOpen` gradients by the number of
  // their record, that were applied since the newest lookup.
  mutable Lookups applied_open_;
  mutable std::map<int64_t, Lookups> applied_;
  // Older lookups were discarded because of a reset, because there were too
  // many newer lookups, or because of an update.
  int64_t first_after_reset_ = 0;
  int64_t first_of_newest_ = 0;
  int64_t first_after_update_ = 0;
  int64_t num_applying_ = 0;
  // The lookups of running updates, by the number of the record.
  std::multimap<int64_t, Lookups> running_;
  // Hashes of gradients with changed rows, and the numbers of their records.
  mutable std::deque<std::pair<size_t, std::vector<int64_t>>> applied_contents_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_ENGINE_ROW_STEPS_H_
