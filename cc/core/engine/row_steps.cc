#include "cc/core/engine/row_steps.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/steps/step.h"

namespace layoutmap {
namespace {

using std::to_string;
using Rows = std::vector<int64_t>;

void SortUnique(Rows* rows) {
  std::sort(rows->begin(), rows->end());
  rows->erase(std::unique(rows->begin(), rows->end()), rows->end());
}

bool Includes(const Rows& rows, const Rows& part) {
  return std::includes(rows.begin(), rows.end(), part.begin(), part.end());
}

// Returns the rows of a gradient in ascending order. A row of a dense gradient
// counts if one of its values is not 0.
Rows RowsOf(const RowSteps::Gradient& gradient) {
  Rows rows;
  const int64_t size = gradient.rows.size();
  const int64_t dim = size == 0 ? 0 : gradient.values.size() / size;
  for (int64_t i = 0; i < size; ++i) {
    const float* values = gradient.values.data() + i * dim;
    if (gradient.is_dense &&
        std::all_of(values, values + dim, [](float v) { return v == 0; })) {
      continue;
    }
    rows.push_back(gradient.rows[i]);
  }
  SortUnique(&rows);
  return rows;
}

}  // namespace

Status RowSteps::Open(std::shared_ptr<const Batch> batch, int64_t* token) {
  engine_->CountBatch(*batch);
  std::lock_guard<std::mutex> lock(mutex_);
  *token = next_token_++;
  open_.emplace(*token, std::move(batch));
  if (static_cast<int64_t>(open_.size()) > kMaxOpen) open_.erase(open_.begin());
  return Status();
}

Status RowSteps::FindLocked(int64_t token,
                            std::shared_ptr<const Batch>* batch) const {
  const auto found = open_.find(token);
  if (found == open_.end()) {
    return Expired("Lookup " + to_string(token) + " has expired");
  }
  *batch = found->second;
  return Status();
}

Status RowSteps::Expired(const std::string& what) const {
  return FailedPrecondition(
      what + ". A gradient must be computed before " + to_string(kMaxOpen) +
      " newer lookups, and applied once, before " + to_string(kMaxOpen) +
      " newer gradients, an update of a lookup that is more than " +
      to_string(kKeptBehind) +
      " lookups newer, a reset or a restore. Otherwise, its rows may belong to "
      "other keys (table '" +
      engine_->config().tables[0].name + "')");
}

Status RowSteps::TakeBack(int64_t token) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<const Batch> batch;
  LM_RETURN_IF_ERROR(FindLocked(token, &batch));
  if (token != next_token_ - 1) {
    return FailedPrecondition(
        "Only the newest lookup can be taken back. Received: lookup " +
        to_string(token) + ", newest " + to_string(next_token_ - 1));
  }
  open_.erase(token);
  engine_->CountBatch(*batch, -1);
  return Status();
}

Status RowSteps::Mark(int64_t token) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<const Batch> batch;
  LM_RETURN_IF_ERROR(FindLocked(token, &batch));
  marked_.emplace(token, std::move(batch));
  return Status();
}

void RowSteps::Record(RecordedRows rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  RemoveUnused();
  RecordedGradient& record = records_[next_record_++];
  record.rows = std::move(rows);
  record.lookups = std::move(marked_);
  marked_.clear();
  int64_t num_waiting = 0;
  for (auto it = records_.rbegin(); it != records_.rend(); ++it) {
    if (!it->second.is_waiting) continue;
    if (++num_waiting > kMaxOpen) Finish(&it->second, false);
  }
}

void RowSteps::Finish(RecordedGradient* record, bool is_applied) {
  record->is_waiting = false;
  record->is_applied = is_applied;
  record->lookups.clear();
}

void RowSteps::RemoveUnused() {
  for (auto it = records_.begin(); it != records_.end();) {
    const bool is_used = it->second.is_waiting || it->second.rows.is_shared();
    it = is_used ? std::next(it) : records_.erase(it);
  }
}

// A gradient without changed rows belongs to one record. For all other
// gradients, the function compares sets of rows:
//
//   the rows of one record           the record; the newest if there are
//   several the rows of several records      these records, whose gradients
//   were added some rows of one record          the newest such record, a
//   masked gradient other rows                       an error, or, if the
//   gradient is dense, the
//                                    newest record, because the caller may have
//                                    added values for all rows
Status RowSteps::FindRecords(const Gradient& gradient,
                             std::vector<int64_t>* found) const {
  std::vector<std::pair<int64_t, Rows>> waiting;  // From newest to oldest.
  for (auto it = records_.rbegin(); it != records_.rend(); ++it) {
    const RecordedGradient& record = it->second;
    const Span<const int64_t> rows = record.rows.rows;
    if (!gradient.is_dense && rows.size() > 0 &&
        rows.data() == gradient.rows.data() &&
        rows.size() == gradient.rows.size()) {
      if (!record.is_waiting) {
        return Expired(record.is_applied ? "The gradient was already applied"
                                         : "The gradient to apply has expired");
      }
      if (record.lookups.empty()) {
        return FailedPrecondition(
            "The gradient to apply contains rows that were not looked up in a "
            "training step of the vocabulary, because the lookup was traced "
            "in a function while no tape recorded it. Call the function in "
            "the tape first, or trace it again (table '" +
            engine_->config().tables[0].name + "')");
      }
      *found = {it->first};
      return Status();
    }
    if (record.is_waiting) waiting.emplace_back(it->first, Rows());
  }
  const Rows rows = RowsOf(gradient);
  if (rows.empty()) {
    if (!waiting.empty()) *found = {waiting[0].first};
    return Status();
  }
  Rows joined;
  for (auto& [number, own] : waiting) {
    for (const auto& [token, batch] : records_.at(number).lookups) {
      for (const RaggedIds& ids : *batch) {
        own.insert(own.end(), ids.rows().begin(), ids.rows().end());
      }
    }
    SortUnique(&own);
    if (own == rows) {
      *found = {number};
      return Status();
    }
    if (!own.empty() && Includes(rows, own)) {
      found->push_back(number);
      joined.insert(joined.end(), own.begin(), own.end());
    }
  }
  SortUnique(&joined);
  if (!found->empty() && (gradient.is_dense || joined == rows)) return Status();
  found->clear();
  for (const auto& [number, own] : waiting) {
    if (!Includes(own, rows)) continue;
    *found = {number};
    return Status();
  }
  if (gradient.is_dense && !waiting.empty()) {
    *found = {waiting[0].first};
    return Status();
  }
  return Expired(
      "The gradient to apply contains rows that no lookup with a pending "
      "gradient has read");
}

Status RowSteps::BeginApply(const Gradient& gradient,
                            std::vector<int64_t>* records) {
  std::lock_guard<std::mutex> lock(mutex_);
  LM_RETURN_IF_ERROR(FindRecords(gradient, records));
  for (const int64_t number : *records) {
    for (const auto& [token, batch] : records_.at(number).lookups) {
      in_use_.Add(batch);
    }
  }
  ++num_applying_;
  return Status();
}

void RowSteps::FinishApply(const std::vector<int64_t>& numbers,
                           const std::vector<TableStep>& tables, bool updated) {
  if (updated) engine_->CountUpdate(tables);
  std::lock_guard<std::mutex> lock(mutex_);
  --num_applying_;
  if (!updated) return;
  int64_t oldest = next_token_;
  for (const int64_t number : numbers) {
    const auto record = records_.find(number);
    if (record == records_.end()) continue;  // The lookups were reset.
    for (const auto& [token, batch] : record->second.lookups) {
      oldest = std::min(oldest, token);
      // After the update, the vocabulary may assign the rows of the lookup to
      // other keys.
      open_.erase(token);
    }
    Finish(&record->second, true);
  }
  if (oldest < next_token_) {
    const int64_t first_kept = oldest - kKeptBehind;
    open_.erase(open_.begin(), open_.lower_bound(first_kept));
    for (auto& [number, record] : records_) {
      if (!record.lookups.empty() &&
          record.lookups.begin()->first < first_kept) {
        Finish(&record, false);
      }
    }
  }
  RemoveUnused();
}

void RowSteps::VisitInFlight(
    const std::function<void(const Batch&)>& visit) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [token, batch] : open_) visit(*batch);
  for (const auto& [number, record] : records_) {
    for (const auto& [token, batch] : record.lookups) visit(*batch);
  }
  in_use_.Visit(visit);
}

void RowSteps::Reset() {
  std::lock_guard<std::mutex> lock(mutex_);
  open_.clear();
  marked_.clear();
  for (auto& [number, record] : records_) Finish(&record, record.is_applied);
  RemoveUnused();
}

bool RowSteps::IsApplying() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_applying_ > 0;
}

int64_t RowSteps::NumOpen() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(open_.size());
}

int64_t RowSteps::NumRecorded() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::count_if(records_.begin(), records_.end(),
                       [](const auto& one) { return one.second.is_waiting; });
}

}  // namespace layoutmap
