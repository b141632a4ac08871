// The worker side of a step on tables with open vocabularies, from the check of
// the batch until the rows of the keys are known. After that, the step
// continues as a WorkerStep (worker_step.h).

#ifndef TF_LAYOUTMAP_CORE_SERVED_KEYS_KEY_STEP_H_
#define TF_LAYOUTMAP_CORE_SERVED_KEYS_KEY_STEP_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/served_keys/key_messages.h"
#include "cc/core/servers/applied_closures.h"
#include "cc/core/servers/worker_step.h"
#include "cc/core/steps/step.h"

namespace layoutmap {

// Properties of a table with an open vocabulary.
struct OpenTable {
  bool is_open = false;
  bool has_unknown_row = false;  // shared by unknown keys
  uint32_t kind = 0;             // kind of the keys
  BucketLayout layout;
};

struct KeysConfig {
  std::shared_ptr<const ServersConfig> servers;
  std::vector<OpenTable> tables;
};

// Computes the layouts of open tables. Returns an error unless the shards
// consist of complete buckets and the table ends with one additional row for
// unknown keys.
Status MakeKeysConfig(std::shared_ptr<const ServersConfig> servers,
                      std::vector<OpenTable> tables, KeysConfig* config);

// One batch of keys. Immutable after its creation.
class KeyStep {
 public:
  // Checks a batch and finds the unique keys of each table.
  static Status Make(std::shared_ptr<const KeysConfig> config,
                     const std::vector<FeatureInput<int64_t>>& inputs,
                     const ParallelFor& parallel_for,
                     std::shared_ptr<const KeyStep>* made);

  const KeysConfig& config() const { return *config_; }

  // Writes the requests for the keys and rows that the batch needs, one per
  // server.
  Status Request(const ClosureToken& token, bool training,
                 const Allocate& allocate) const;

  // Creates the step with the rows that the servers found. Returns an error if
  // the responses do not match the requests.
  Status Place(const std::vector<Span<const uint8_t>>& fetched,
               const ParallelFor& parallel_for,
               std::shared_ptr<const WorkerStep>* placed) const;

 private:
  // The keys of one table: `unique` in the order of their first use, and the
  // index of the unique key for each use.
  struct Keys {
    std::vector<int64_t> unique;
    std::vector<uint32_t> times;
    std::vector<uint32_t> used;
    std::vector<int32_t> shards;  // shard of each unique key
  };

  KeyStep() = default;

  static Keys Find(const OpenTable& table, const RowPartition& partition,
                   Span<const int64_t> keys);
  Status ReadPlaces(const std::vector<Span<const uint8_t>>& fetched,
                    std::vector<std::vector<int64_t>>* rows,
                    FetchedLayout* layout) const;

  std::shared_ptr<const KeysConfig> config_;
  std::shared_ptr<const Batch>
      batch_;               // the rows of open tables are not known yet
  std::vector<Keys> keys_;  // by table; empty for closed tables
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVED_KEYS_KEY_STEP_H_
