#include "cc/core/engine/row_steps.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/engine/expiry.h"
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

// Returns a hash of the rows and values of a gradient.
size_t ContentOf(const RowSteps::Gradient& gradient) {
  const auto hash = [](const auto& values) {
    return std::hash<std::string_view>()(
        {reinterpret_cast<const char*>(values.data()),
         values.size() * sizeof(*values.data())});
  };
  return hash(gradient.rows) * 31 + hash(gradient.values);
}

// Returns the rows of lookups in ascending order.
Rows RowsOf(const std::map<int64_t, std::shared_ptr<const Batch>>& lookups) {
  Rows rows;
  for (const auto& [token, batch] : lookups) {
    for (const RaggedIds& ids : *batch) {
      rows.insert(rows.end(), ids.rows().begin(), ids.rows().end());
    }
  }
  SortUnique(&rows);
  return rows;
}

}  // namespace

Status RowSteps::Open(std::shared_ptr<const Batch> batch, int64_t* token) {
  engine_->CountBatch(*batch);
  std::lock_guard<std::mutex> lock(mutex_);
  DiscardApplied();
  *token = next_token_++;
  open_.emplace(*token, std::move(batch));
  // `Mark` can have opened several applied lookups again.
  while (static_cast<int64_t>(open_.size()) > kMaxOpen) {
    first_of_newest_ = std::max(first_of_newest_, open_.begin()->first + 1);
    open_.erase(open_.begin());
  }
  return Status();
}

Status RowSteps::FindLocked(int64_t token,
                            std::shared_ptr<const Batch>* batch) const {
  const Lookups& lookups = open_.count(token) > 0 ? open_ : applied_open_;
  const auto found = lookups.find(token);
  if (found != lookups.end()) {
    *batch = found->second;
    return Status();
  }
  return Expired("Lookup " + to_string(token) + " has expired",
                 WhyExpired(token));
}

Status RowSteps::Expired(const std::string& what, Expiry expiry) const {
  return FailedPrecondition(
      what + ": " + ExpiryReason(expiry, kMaxOpen, kKeptBehind) + " (table '" +
      engine_->config().tables[0].name + "')");
}

Expiry RowSteps::WhyExpired(int64_t token) const {
  if (token < first_after_reset_) return Expiry::kReset;
  if (token < first_of_newest_) return Expiry::kTooManyNewer;
  if (token < first_after_update_) return Expiry::kOlderThanUpdate;
  return Expiry::kApplied;
}

const RowSteps::Lookups& RowSteps::LookupsOf(int64_t number) const {
  const auto applied = applied_.find(number);
  return applied == applied_.end() ? records_.at(number).lookups
                                   : applied->second;
}

void RowSteps::DiscardApplied() const {
  applied_open_.clear();
  applied_.clear();
  applied_contents_.clear();
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
  // The rows of an applied lookup must stay assigned to their keys until its
  // next gradient is applied, too.
  const auto applied = applied_open_.find(token);
  if (applied != applied_open_.end()) {
    open_.insert(applied_open_.extract(applied));
  }
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
    if (++num_waiting > kMaxOpen) Finish(&it->second, Expiry::kTooManyNewer);
  }
}

void RowSteps::Finish(RecordedGradient* record, Expiry expiry) {
  if (record->is_waiting) record->expiry = expiry;
  record->is_waiting = false;
  record->lookups.clear();
}

void RowSteps::RemoveUnused() {
  for (auto it = records_.begin(); it != records_.end();) {
    const bool is_used = it->second.is_waiting || it->second.rows.is_shared() ||
                         applied_.count(it->first) > 0;
    it = is_used ? std::next(it) : records_.erase(it);
  }
}

// A gradient without changed rows belongs to one record. For all other
// gradients, the function compares sets of rows:
//
// - The rows of one record: the record; the newest if there are several.
// - The rows of several records, whose gradients were added: these records.
// - Some rows of one record, whose gradient was masked: the newest such record.
// - Other rows: an error, or, if the gradient is dense, the newest record,
//   because the caller may have added values for all rows.
//
// Before this comparison, a gradient whose rows and values are equal to the
// rows and values of an applied gradient is applied again. Equal rows are not
// sufficient: the gradient may belong to an expired lookup of other keys.
Status RowSteps::FindRecords(const Gradient& gradient,
                             std::vector<int64_t>* found,
                             bool* is_changed) const {
  std::vector<std::pair<int64_t, Rows>> waiting;  // From newest to oldest.
  for (auto it = records_.rbegin(); it != records_.rend(); ++it) {
    const RecordedGradient& record = it->second;
    const Span<const int64_t> rows = record.rows.rows;
    if (!gradient.is_dense && rows.size() > 0 &&
        rows.data() == gradient.rows.data() &&
        rows.size() == gradient.rows.size()) {
      *found = {it->first};
      if (applied_.count(it->first) > 0) return Status();
      if (!record.is_waiting) {
        return Expired("The gradient to apply has expired", record.expiry);
      }
      if (record.lookups.empty()) {
        return FailedPrecondition(
            "The gradient to apply contains rows that were not looked up in a "
            "training step of the vocabulary, because the lookup was traced "
            "in a function while no tape recorded it. Call the function in "
            "the tape first, or trace it again (table '" +
            engine_->config().tables[0].name + "')");
      }
      return Status();
    }
    if (record.is_waiting) waiting.emplace_back(it->first, Rows());
  }
  *is_changed = true;
  const Rows rows = RowsOf(gradient);
  if (rows.empty()) {
    if (!waiting.empty()) *found = {waiting[0].first};
    return Status();
  }
  const size_t content = ContentOf(gradient);
  for (const auto& [applied_content, numbers] : applied_contents_) {
    const bool is_applied =
        std::all_of(numbers.begin(), numbers.end(),
                    [&](int64_t number) { return applied_.count(number) > 0; });
    if (applied_content != content || !is_applied) continue;
    *found = numbers;
    return Status();
  }
  Rows joined;
  for (auto& [number, own] : waiting) {
    own = RowsOf(records_.at(number).lookups);
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
  return FailedPrecondition(
      "The gradient to apply contains rows that no lookup with a pending "
      "gradient has read, or that only expired lookups have read. A gradient "
      "must be applied before " +
      to_string(kMaxOpen) +
      " newer gradients, an update of a lookup that is more than " +
      to_string(kKeptBehind) +
      " lookups newer, a reset or a restore, and again before the next lookup. "
      "Otherwise, its rows may belong to other keys (table '" +
      engine_->config().tables[0].name + "')");
}

Status RowSteps::BeginApply(const Gradient& gradient,
                            std::vector<int64_t>* records) {
  std::lock_guard<std::mutex> lock(mutex_);
  records->clear();
  bool is_changed = false;
  LM_RETURN_IF_ERROR(FindRecords(gradient, records, &is_changed));
  if (is_changed && !records->empty()) {
    applied_contents_.emplace_back(ContentOf(gradient), *records);
    if (static_cast<int64_t>(applied_contents_.size()) > kMaxOpen) {
      applied_contents_.pop_front();
    }
  }
  for (const int64_t number : *records) {
    running_.emplace(number, LookupsOf(number));
  }
  ++num_applying_;
  return Status();
}

void RowSteps::FinishApply(const std::vector<int64_t>& numbers,
                           const std::vector<TableStep>& tables, bool updated) {
  if (updated) engine_->CountUpdate(tables);
  std::lock_guard<std::mutex> lock(mutex_);
  --num_applying_;
  for (const int64_t number : numbers) running_.erase(running_.find(number));
  if (!updated) return;
  int64_t oldest = next_token_;
  for (const int64_t number : numbers) {
    const auto record = records_.find(number);
    // The lookups were reset, or the gradient was applied again.
    if (record == records_.end() || !record->second.is_waiting) continue;
    for (const auto& [token, batch] : record->second.lookups) {
      oldest = std::min(oldest, token);
      // After the update, the vocabulary may assign the rows of the lookup to
      // other keys.
      const auto open = open_.find(token);
      if (open != open_.end()) applied_open_.insert(open_.extract(open));
    }
    applied_[number] = std::move(record->second.lookups);
    Finish(&record->second, Expiry::kApplied);
  }
  while (static_cast<int64_t>(applied_.size()) > kMaxOpen) {
    records_.at(applied_.begin()->first).expiry = Expiry::kTooManyNewer;
    applied_.erase(applied_.begin());
  }
  if (oldest < next_token_) {
    const int64_t first_kept = oldest - kKeptBehind;
    first_after_update_ = std::max(first_after_update_, first_kept);
    open_.erase(open_.begin(), open_.lower_bound(first_kept));
    for (auto& [number, record] : records_) {
      if (!record.lookups.empty() &&
          record.lookups.begin()->first < first_kept) {
        Finish(&record, Expiry::kOlderThanUpdate);
      }
    }
  }
  RemoveUnused();
}

void RowSteps::VisitInFlight(
    const std::function<void(const Batch&)>& visit) const {
  std::lock_guard<std::mutex> lock(mutex_);
  DiscardApplied();
  for (const auto& [token, batch] : open_) visit(*batch);
  for (const auto& [number, record] : records_) {
    for (const auto& [token, batch] : record.lookups) visit(*batch);
  }
  for (const auto& [number, lookups] : running_) {
    for (const auto& [token, batch] : lookups) visit(*batch);
  }
}

void RowSteps::Reset() {
  std::lock_guard<std::mutex> lock(mutex_);
  open_.clear();
  marked_.clear();
  DiscardApplied();
  first_after_reset_ = next_token_;
  for (auto& [number, record] : records_) Finish(&record, Expiry::kReset);
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
