#include "cc/core/rows/changed_rows.h"

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"

namespace layoutmap {
namespace {

using std::to_string;
constexpr int64_t kBits = 64;

}  // namespace

ChangedRows::ChangedRows(std::vector<int64_t> num_rows)
    : num_rows_(std::move(num_rows)) {}

int64_t ChangedRows::Watch() {
  std::lock_guard<std::mutex> lock(mutex_);
  bits_.assign(num_rows_.size(), {});
  for (size_t t = 0; t < num_rows_.size(); ++t) {
    bits_[t].assign((num_rows_[t] + kBits - 1) / kBits, 0);
  }
  return ++watch_;
}

template <typename Rows>
void ChangedRows::NoteRows(int32_t table, const Rows& rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (bits_.empty()) return;
  std::vector<uint64_t>& bits = bits_[table];
  for (const auto row : rows) {
    const auto at = static_cast<int64_t>(row);
    if (at >= 0) bits[at / kBits] |= uint64_t{1} << (at % kBits);
  }
}

void ChangedRows::Note(int32_t table, const std::vector<uint32_t>& rows) {
  NoteRows(table, rows);
}

void ChangedRows::Note(int32_t table, Span<const int64_t> rows) {
  NoteRows(table, rows);
}

Status ChangedRows::Take(int64_t watch,
                         const std::vector<std::vector<int64_t>>& also,
                         std::vector<std::vector<int64_t>>* rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (watch != watch_ || bits_.empty()) {
    return FailedPrecondition(
        "A later watch of the changes of these tables has replaced this one; "
        "only the latest watch can take changes");
  }
  if (also.size() != num_rows_.size()) {
    return InvalidArgument("`also` must have one list of rows for each of " +
                           to_string(num_rows_.size()) +
                           " tables. Received: " + to_string(also.size()));
  }
  for (size_t t = 0; t < also.size(); ++t) {
    for (const int64_t row : also[t]) {
      if (row >= 0 && row < num_rows_[t]) continue;
      return InvalidArgument(
          "`also` must contain rows of table " + to_string(t) + ", which has " +
          to_string(num_rows_[t]) + " rows. Received: " + to_string(row));
    }
  }
  std::vector<std::vector<int64_t>> found(num_rows_.size());
  for (size_t t = 0; t < also.size(); ++t) {
    std::vector<uint64_t>& bits = bits_[t];
    for (const int64_t row : also[t]) {
      bits[row / kBits] |= uint64_t{1} << (row % kBits);
    }
    for (size_t word = 0; word < bits.size(); ++word) {
      for (uint64_t left = bits[word]; left != 0; left &= left - 1) {
        found[t].push_back(static_cast<int64_t>(word) * kBits +
                           __builtin_ctzll(left));
      }
    }
  }
  // The bits are cleared last, so that no recorded row is lost if an allocation
  // above fails.
  for (std::vector<uint64_t>& bits : bits_) bits.assign(bits.size(), 0);
  *rows = std::move(found);
  return Status();
}

}  // namespace layoutmap
