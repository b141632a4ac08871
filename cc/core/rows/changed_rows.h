// Which rows of some tables were written since somebody last asked.
//
// One bit for each row, so that asking costs what was written and not what
// there is. Nothing is kept until somebody watches.

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
  // How many rows each table has.
  explicit ChangedRows(std::vector<int64_t> num_rows);

  // Begins anew, with no row changed. Whoever watched before is refused from
  // now on. Returns what `Take` asks for.
  int64_t Watch();

  // Notes rows of a table as written. Negative ones are none. The caller holds
  // the locks under which the rows were written, so that whoever takes them
  // under these locks reads what was written.
  void Note(int32_t table, const std::vector<uint32_t>& rows);
  void Note(int32_t table, Span<const int64_t> rows);

  // Of each table the rows that were noted, and those of `also`, each once and
  // ascending; they are forgotten. Refused, with nothing forgotten, if somebody
  // else has begun to watch, or `also` is no row of its table.
  Status Take(int64_t watch, const std::vector<std::vector<int64_t>>& also,
              std::vector<std::vector<int64_t>>* rows);

 private:
  template <typename Rows>
  void NoteRows(int32_t table, const Rows& rows);

  const std::vector<int64_t> num_rows_;
  std::mutex mutex_;  // guards all below
  int64_t watch_ = 0;
  std::vector<std::vector<uint64_t>> bits_;  // by table; empty: nobody watches
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_ROWS_CHANGED_ROWS_H_
