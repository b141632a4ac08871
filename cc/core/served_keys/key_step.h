// The worker side of a step on tables with open vocabularies. A KeyStep checks
// the batch, requests the rows of the keys from the servers, and creates a
// WorkerStep (worker_step.h), which runs the rest of the step.

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

// The properties of one table. If `is_open` is false, the table has no open
// vocabulary.
struct OpenTable {
  bool is_open = false;
  // Whether unknown keys share a row.
  bool has_unknown_row = false;
  BucketLayout layout;
};

struct KeysConfig {
  std::shared_ptr<const ServersConfig> servers;
  std::vector<OpenTable> tables;
};

// Computes the layouts of tables with open vocabularies. Returns an error if a
// shard does not consist of complete buckets, or if the table does not end with
// one additional row for unknown keys.
Status MakeKeysConfig(std::shared_ptr<const ServersConfig> servers,
                      std::vector<OpenTable> tables, KeysConfig* config);

// The step of one batch of keys. The object is immutable.
class KeyStep {
 public:
  // Checks a batch and finds the unique keys of each table.
  static Status Make(std::shared_ptr<const KeysConfig> config,
                     const std::vector<FeatureInput<int64_t>>& inputs,
                     const ParallelFor& parallel_for,
                     std::shared_ptr<const KeyStep>* made);

  const KeysConfig& config() const { return *config_; }

  // Writes one request per server. Each request contains the keys and the rows
  // that the batch needs from the server. `kinds` contains one kind of keys per
  // table. If a table has no open vocabulary, its kind is 0.
  Status Request(const ClosureToken& token, bool training,
                 const std::vector<uint32_t>& kinds,
                 const Allocate& allocate) const;

  // Creates the WorkerStep with the rows that the servers found. Returns an
  // error if the responses do not match the requests.
  Status Place(const std::vector<Span<const uint8_t>>& fetched,
               const ParallelFor& parallel_for,
               std::shared_ptr<const WorkerStep>* placed) const;

  // A lookup, and the responses of the servers.
  struct Lookup {
    std::shared_ptr<const KeyStep> step;
    std::vector<Span<const uint8_t>> fetched;
  };

  // Creates the WorkerStep of this batch, which contains the samples of several
  // lookups: for each feature, the samples of the first lookup, then the
  // samples of the second lookup, and so on. Each key gets the row that it had
  // in its lookup. The servers must use the response of the first lookup as the
  // response to this batch. Returns an error if the batch does not consist of
  // the lookups, or if responses do not match their requests.
  Status PlaceJoined(const std::vector<Lookup>& lookups,
                     const ParallelFor& parallel_for,
                     std::shared_ptr<const WorkerStep>* placed) const;

  // Returns the size in bytes of each server's response to `step`, which
  // `PlaceJoined` created.
  std::vector<int64_t> JoinedSizes(const WorkerStep& step) const;

 private:
  // The keys of one table. `unique` contains the unique keys in the order of
  // their first use. For each use, the index of its unique key is stored.
  struct Keys {
    std::vector<int64_t> unique;
    std::vector<uint32_t> times;
    std::vector<uint32_t> used;
    // The shard of each unique key.
    std::vector<int32_t> shards;
  };

  KeyStep() = default;

  static Keys Find(const OpenTable& table, const RowPartition& partition,
                   Span<const int64_t> keys);
  Status ReadPlaces(const std::vector<Span<const uint8_t>>& fetched,
                    std::vector<std::vector<int64_t>>* rows,
                    FetchedLayout* layout) const;
  // Appends the row of each key of feature `f`, in the order of the batch.
  // `next` contains the number of keys of each table in the features before
  // `f`.
  void AppendRows(size_t f, const std::vector<std::vector<int64_t>>& rows,
                  std::vector<size_t>* next, std::vector<int64_t>* found) const;
  Status CheckNumFetched(size_t num_fetched) const;

  std::shared_ptr<const KeysConfig> config_;
  // The checked batch, in which the rows of the keys are not known yet.
  std::shared_ptr<const Batch> batch_;
  // One element per table. The element of a table without an open vocabulary is
  // empty.
  std::vector<Keys> keys_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVED_KEYS_KEY_STEP_H_
