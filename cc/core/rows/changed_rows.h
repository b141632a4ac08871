// Records which rows of tables have changed since the last query.
//
// The record has one bit per row. The result of a query contains only the rows
// that have changed. Before the first call of `Watch`, no changes are recorded.

#ifndef TF_LAYOUTMAP_CORE_ROWS_CHANGED_ROWS_H_
#define TF_LAYOUTMAP_CORE_ROWS_CHANGED_ROWS_H_

#include <cstdint>
#include <mutex>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"

namespace layoutmap {

class ChangedRows {
 public:
  // `num_rows` is the number of rows of each table.
  explicit ChangedRows(std::vector<int64_t> num_rows);

  // Clears the record and returns the id of a new watch, which `Take` requires.
  // The ids of earlier watches become invalid.
  int64_t Watch();

  // Records rows of a table as changed. Negative rows are ignored. The caller
  // must still hold the locks under which it wrote the rows. A caller of `Take`
  // that holds the same locks therefore reads the written values.
  void Note(int32_t table, const std::vector<uint32_t>& rows);
  void Note(int32_t table, Span<const int64_t> rows);

  // For each table, returns the recorded rows and the rows in `also`, in
  // ascending order and without duplicates. Then clears the record. If a later
  // call of `Watch` has replaced `watch`, or if `also` contains a row outside
  // its table, returns an error and does not clear the record.
  Status Take(int64_t watch, const std::vector<std::vector<int64_t>>& also,
              std::vector<std::vector<int64_t>>* rows);

 private:
  template <typename Rows>
  void NoteRows(int32_t table, const Rows& rows);

  const std::vector<int64_t> num_rows_;
  // Guards the members below.
  std::mutex mutex_;
  int64_t watch_ = 0;
  // One bit per row, indexed by table. Empty before the first call of `Watch`.
  std::vector<std::vector<uint64_t>> bits_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_ROWS_CHANGED_ROWS_H_
