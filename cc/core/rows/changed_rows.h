// Records which rows of tables have changed since the last query.
//
// There is one bit per row, so that the cost of a query depends on the number
// of changed rows. Nothing is recorded before the first call of `Watch`.

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

  // Starts a new watch without changed rows and returns its id for `Take`.
  // Earlier watches become invalid.
  int64_t Watch();

  // Records rows of a table as changed. Negative rows are ignored. The caller
  // must hold the locks under which it has written the rows. A caller of `Take`
  // that holds the same locks therefore reads the written values.
  void Note(int32_t table, const std::vector<uint32_t>& rows);
  void Note(int32_t table, Span<const int64_t> rows);

  // For each table, returns the recorded rows and the rows of `also`, ascending
  // and without duplicates, and clears the record. Returns an error and clears
  // nothing if `watch` was replaced by a later watch, or if `also` contains a
  // row outside its table.
  Status Take(int64_t watch, const std::vector<std::vector<int64_t>>& also,
              std::vector<std::vector<int64_t>>* rows);

 private:
  template <typename Rows>
  void NoteRows(int32_t table, const Rows& rows);

  const std::vector<int64_t> num_rows_;
  std::mutex mutex_;  // guards the members below
  int64_t watch_ = 0;
  std::vector<std::vector<uint64_t>> bits_;  // by table; empty before `Watch`
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_ROWS_CHANGED_ROWS_H_
