// The tables that pipelined lookups of SparseCores use.

#ifndef TF_LAYOUTMAP_EMULATION_KERNELS_EARLIER_TABLES_H_
#define TF_LAYOUTMAP_EMULATION_KERNELS_EARLIER_TABLES_H_

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "tensorflow/core/framework/tensor.h"

namespace layoutmap {

// Identifies an iteration of a loop on a chip.
struct Iteration {
  int64_t step = 0;
  uint64_t frame = 0;
  int64_t index = -1;
};

// The tables that pipelined lookups use. On a TPU, the lookup of a step runs
// before the update of the last step of the loop. In the emulation, it runs
// after this update, and uses a copy of the table.
class EarlierTables {
 public:
  static EarlierTables& Get() {
    static EarlierTables* tables = new EarlierTables;
    return *tables;
  }

  // Saves a table before the first update of an iteration. `name` identifies
  // the table in the program of a chip.
  void Save(const std::string& name, int64_t chip, const Iteration& now,
            const tensorflow::Tensor& table) {
    std::lock_guard<std::mutex> lock(mutex_);
    Saved& saved = saved_[{name, chip}][now.index % 2];
    if (IsSame(saved.when, now)) return;
    saved = {now, table};
  }

  // Returns the table without the updates of the last iteration.
  tensorflow::Tensor Find(const std::string& name, int64_t chip,
                          const Iteration& now,
                          const tensorflow::Tensor& table) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = saved_.find({name, chip});
    const Iteration last = {now.step, now.frame, now.index - 1};
    if (now.index == 0 || found == saved_.end()) return table;
    const Saved& saved = found->second[last.index % 2];
    return IsSame(saved.when, last) ? saved.table : table;
  }

 private:
  struct Saved {
    Iteration when;
    tensorflow::Tensor table;
  };

  static bool IsSame(const Iteration& a, const Iteration& b) {
    return a.step == b.step && a.frame == b.frame && a.index == b.index;
  }

  std::mutex mutex_;
  // The tables of the last two iterations that have updated a table. They are
  // kept until the next loop, because kernels do not get the end of a loop.
  std::map<std::pair<std::string, int64_t>, std::array<Saved, 2>> saved_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_KERNELS_EARLIER_TABLES_H_
