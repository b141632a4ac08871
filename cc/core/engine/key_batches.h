// Batches whose ids are keys of open vocabularies and whose rows are not known
// yet.

#ifndef TF_LAYOUTMAP_CORE_ENGINE_KEY_BATCHES_H_
#define TF_LAYOUTMAP_CORE_ENGINE_KEY_BATCHES_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/engine/token_steps.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"

namespace layoutmap {

struct RowGroups;

// The keys of one table.
struct TableKeys {
  TableKeys() = default;
  // Copies are not possible because `keys` may be a view of `joined`.
  TableKeys(TableKeys&&) = default;
  TableKeys& operator=(TableKeys&&) = default;

  Span<const int64_t> keys;
  // Memory of `keys`, unless `keys` is a view of one input.
  std::vector<int64_t> joined;
};

// The batches of all replicas of one step. They are checked completely before a
// vocabulary processes the first key. The memory of `inputs` must stay valid
// until `Finish`.
class KeyBatches {
 public:
  // `is_open` contains for each table whether its ids are keys; the ids of
  // other tables are rows. `inputs` are indexed by replica, then by feature.
  static Status Make(
      const EngineConfig& config, const std::vector<bool>& is_open,
      const std::vector<std::vector<FeatureInput<int64_t>>>& inputs,
      KeyBatches* made);

  // Returns the keys of one table by feature, then by replica, as if one
  // replica had all samples. Keys beyond the maximum length of a sequence are
  // not included.
  TableKeys KeysOf(int32_t table) const;

  // Sets the rows of the keys from `KeysOf`. `unknown_row` is the row of keys
  // without a row, or negative if their embedding is zero. `groups` may hold
  // the unique rows, without `unknown_row`, with the indices of the keys as
  // positions.
  void TakeRows(int32_t table, Span<const int64_t> rows, int64_t unknown_row,
                int32_t step, std::shared_ptr<RowGroups> groups = nullptr);

  // Returns the batches by replica. Must be called after all open tables have
  // their rows.
  std::vector<std::shared_ptr<const Batch>> Finish();

 private:
  template <typename Visit>
  void ForFeaturesOf(int32_t table, const Visit& visit) const;

  const EngineConfig* config_ = nullptr;
  std::vector<std::shared_ptr<Batch>> batches_;
  std::vector<std::vector<TableKeys>> keys_;  // by replica, then by feature
};

// The rows of an open table that are in use by steps in flight.
struct RowsInFlight {
  // The oldest step of the vocabulary in flight, or INT32_MAX.
  int32_t oldest_step = INT32_MAX;
  // Ascending rows of lookups that are not steps of the vocabulary.
  std::vector<int64_t> pinned_rows;
};

RowsInFlight FindRowsInFlight(const HostEngine& engine,
                              const TokenSteps& tokens, int32_t table);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_ENGINE_KEY_BATCHES_H_
