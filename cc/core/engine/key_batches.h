// Batches whose ids are keys of open vocabularies. The rows of the keys are not
// known yet.

#ifndef TF_LAYOUTMAP_CORE_ENGINE_KEY_BATCHES_H_
#define TF_LAYOUTMAP_CORE_ENGINE_KEY_BATCHES_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/engine/row_steps.h"
#include "cc/core/engine/token_steps.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"

namespace layoutmap {

struct RowGroups;

// The keys of one table.
struct TableKeys {
  TableKeys() = default;
  // Objects can be moved, but not copied, because `keys` may be a view of
  // `joined`.
  TableKeys(TableKeys&&) = default;
  TableKeys& operator=(TableKeys&&) = default;

  Span<const int64_t> keys;
  // Stores the values of `keys`, unless `keys` is a view of one input.
  std::vector<int64_t> joined;
};

// The batches of all replicas in one step. All keys are checked before a
// vocabulary processes the first key. The memory of `inputs` must stay valid
// until `Finish` is called.
class KeyBatches {
 public:
  // `is_open` has one value per table: true if the ids of the table are keys,
  // false if the ids are rows. `inputs` are indexed by replica, then by
  // feature.
  static Status Make(
      const EngineConfig& config, const std::vector<bool>& is_open,
      const std::vector<std::vector<FeatureInput<int64_t>>>& inputs,
      KeyBatches* made);

  // Returns the keys of one table, ordered by feature, then by replica. The
  // order is the same as if one replica had all samples. Keys beyond the
  // maximum length of a sequence are not included.
  TableKeys KeysOf(int32_t table) const;

  // Sets the row of each key that `KeysOf` returned. Keys without a row get the
  // row `unknown_row`. If `unknown_row` is negative, their embedding is zero.
  // If `groups` is not null, it contains the unique rows except for
  // `unknown_row`, and its positions are indices of keys.
  void TakeRows(int32_t table, Span<const int64_t> rows, int64_t unknown_row,
                int32_t step, std::shared_ptr<RowGroups> groups = nullptr);

  // Returns one batch per replica. The rows of all open-vocabulary tables must
  // have been set.
  std::vector<std::shared_ptr<const Batch>> Finish();

 private:
  template <typename Visit>
  void ForFeaturesOf(int32_t table, const Visit& visit) const;

  const EngineConfig* config_ = nullptr;
  std::vector<std::shared_ptr<Batch>> batches_;
  // Indexed by replica, then by feature.
  std::vector<std::vector<TableKeys>> keys_;
};

// The rows of an open-vocabulary table that steps in flight use.
struct RowsInFlight {
  // Number of the oldest vocabulary step in flight, or INT32_MAX if no step is
  // in flight.
  int32_t oldest_step = INT32_MAX;
  // The rows that are used by lookups without a vocabulary step, in ascending
  // order.
  std::vector<int64_t> pinned_rows;
};

RowsInFlight FindRowsInFlight(const HostEngine& engine,
                              const TokenSteps& tokens,
                              const RowSteps& row_steps, int32_t table);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_ENGINE_KEY_BATCHES_H_
