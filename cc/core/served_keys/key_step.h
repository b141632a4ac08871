// The worker's half of a step whose tables have open vocabularies, up to the
// rows of its keys: from then on it is a step as any (worker_step.h).

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

// What is special of a table with an open vocabulary.
struct OpenTable {
  bool is_open = false;
  bool has_unknown_row = false;  // which unknown keys share
  uint32_t kind = 0;             // what its keys are made of
  BucketLayout layout;
};

struct KeysConfig {
  std::shared_ptr<const ServersConfig> servers;
  std::vector<OpenTable> tables;
};

// Finds the layouts of open tables; refused where shards are not whole buckets
// but for the row of unknown keys, which comes last.
Status MakeKeysConfig(std::shared_ptr<const ServersConfig> servers,
                      std::vector<OpenTable> tables, KeysConfig* config);

// One batch of keys. Not written to after it is made.
class KeyStep {
 public:
  // Checks a batch and finds the keys of each table, each once.
  static Status Make(std::shared_ptr<const KeysConfig> config,
                     const std::vector<FeatureInput<int64_t>>& inputs,
                     const ParallelFor& parallel_for,
                     std::shared_ptr<const KeyStep>* made);

  const KeysConfig& config() const { return *config_; }

  // Writes to each server which keys and rows the batch needs.
  Status Request(const ClosureToken& token, bool training,
                 const Allocate& allocate) const;

  // The step with the rows that the servers found. Refused if what they sent is
  // not what was asked for.
  Status Place(const std::vector<Span<const uint8_t>>& fetched,
               const ParallelFor& parallel_for,
               std::shared_ptr<const WorkerStep>* placed) const;

 private:
  // The keys of one table: `unique` by first use, and for each use which.
  struct Keys {
    std::vector<int64_t> unique;
    std::vector<uint32_t> times;
    std::vector<uint32_t> used;
    std::vector<int32_t> shards;  // of each unique one
  };

  KeyStep() = default;

  static Keys Find(const OpenTable& table, const RowPartition& partition,
                   Span<const int64_t> keys);
  Status ReadPlaces(const std::vector<Span<const uint8_t>>& fetched,
                    std::vector<std::vector<int64_t>>* rows,
                    FetchedLayout* layout) const;

  std::shared_ptr<const KeysConfig> config_;
  std::shared_ptr<const Batch> batch_;  // rows of open tables are to come
  std::vector<Keys> keys_;              // by table; empty of closed ones
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVED_KEYS_KEY_STEP_H_
