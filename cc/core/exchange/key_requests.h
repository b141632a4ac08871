// Requests for the rows of keys, in a step whose tables with open vocabularies
// are sharded over processes.
//
// Each key belongs to the process that has the segment of the key. A process
// sends the keys of its batch to their owners. The owners admit the keys of all
// processes and return rows. A request contains the keys of each feature
// separately, because an owner admits keys in the order feature, replica,
// position, like the host engine in a single process.
//
// A request is encoded as `words`. For each feature whose table has an open
// vocabulary, the words are, in this order:
//
//   * The number of unique keys, and flags.
//   * The keys in the order of their first use (two words each).
//   * The number of uses of each key (omitted if all numbers are 1).

#ifndef TF_LAYOUTMAP_CORE_EXCHANGE_KEY_REQUESTS_H_
#define TF_LAYOUTMAP_CORE_EXCHANGE_KEY_REQUESTS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/served_keys/key_messages.h"
#include "cc/core/served_keys/key_step.h"
#include "cc/core/steps/step.h"

namespace layoutmap {

// The requests of one batch. The owners of keys are the servers in the
// configuration.
class KeyRequests {
 public:
  // Checks a batch and finds the unique keys of each feature. The memory of
  // `inputs` is not used after the call.
  static Status Make(std::shared_ptr<const KeysConfig> config,
                     const std::vector<FeatureInput<int64_t>>& inputs,
                     const ParallelFor& parallel_for, KeyRequests* made);

  // Encodes one request per owner.
  std::vector<std::vector<uint32_t>> Write() const;

  // Returns the number of keys in the request to each owner.
  std::vector<int64_t> NumKeys() const;

  // Creates the batch with the rows that the owners have found. `rows` contains
  // one list per owner, with one element for each key of the request: the row
  // of the key in its shard, or kNoPlace. Returns an error if the lists do not
  // match the requests.
  Status Place(const std::vector<Span<const uint32_t>>& rows,
               std::shared_ptr<const Batch>* placed) const;

 private:
  // The keys of one feature. `unique` contains the unique keys in the order of
  // their first use. For each use, the index of its unique key is stored.
  struct Keys {
    int32_t feature = 0;
    std::vector<int64_t> unique;
    std::vector<uint32_t> times;
    std::vector<uint32_t> used;
    // The shard of each unique key.
    std::vector<int32_t> shards;
  };

  // Returns the owner of each shard of the table of a feature.
  const int32_t* OwnersOf(const Keys& keys) const;
  void Find(Span<const int64_t> keys, Keys* found) const;

  std::shared_ptr<const KeysConfig> config_;
  // The checked batch, in which the rows of the keys are not known yet.
  std::shared_ptr<const Batch> batch_;
  // The features whose tables have open vocabularies.
  std::vector<Keys> keys_;
};

// Decodes one request, which contains the keys of `num_features` features.
// Returns an error if `words` is malformed.
Status ReadKeyRequest(Span<const uint32_t> words, int64_t num_features,
                      std::vector<PieceKeys>* keys);

// Returns a list that contains each key as often as the key is used.
std::vector<int64_t> ExpandUses(const PieceKeys& keys);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_EXCHANGE_KEY_REQUESTS_H_
