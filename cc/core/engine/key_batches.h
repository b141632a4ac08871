// Batches whose ids are keys of open vocabularies, before their rows are known.

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
  // Not copied: `keys` may be a view of `joined`.
  TableKeys(TableKeys&&) = default;
  TableKeys& operator=(TableKeys&&) = default;

  Span<const int64_t> keys;
  std::vector<int64_t> joined;  // their memory, if it is not that of one input
};

// The batches of all replicas that take a step together. Everything about them
// is checked before a vocabulary sees the first key. The memory of `inputs` has
// to be there until `Finish`.
class KeyBatches {
 public:
  // `is_open` says by table whether its ids are keys; those of others are rows
  // as ever. `inputs` are by replica, then by feature.
  static Status Make(
      const EngineConfig& config, const std::vector<bool>& is_open,
      const std::vector<std::vector<FeatureInput<int64_t>>>& inputs,
      KeyBatches* made);

  // Of one table, by feature, then by replica: as if one replica had all
  // samples. Keys that a sequence cuts off are none.
  TableKeys KeysOf(int32_t table) const;

  // The rows of these keys; `unknown_row` is that of keys without one, or
  // negative if they are as zeros. `groups`, if there are any, are these rows
  // without that one, by the number of the key.
  void TakeRows(int32_t table, Span<const int64_t> rows, int64_t unknown_row,
                int32_t step, std::shared_ptr<RowGroups> groups = nullptr);

  // By replica, once all open tables have their rows.
  std::vector<std::shared_ptr<const Batch>> Finish();

 private:
  template <typename Visit>
  void ForFeaturesOf(int32_t table, const Visit& visit) const;

  const EngineConfig* config_ = nullptr;
  std::vector<std::shared_ptr<Batch>> batches_;
  std::vector<std::vector<TableKeys>> keys_;  // by replica, then by feature
};

// What steps in flight use of an open table.
struct RowsInFlight {
  // The oldest step of the vocabulary that is in flight, or INT32_MAX.
  int32_t oldest_step = INT32_MAX;
  // Rows of lookups that are no step of it. Ascending.
  std::vector<int64_t> pinned_rows;
};

RowsInFlight FindRowsInFlight(const HostEngine& engine,
                              const TokenSteps& tokens, int32_t table);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_ENGINE_KEY_BATCHES_H_
