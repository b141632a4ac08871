// Operations of a server on keys: finding their rows, and inserting new keys.

#ifndef TF_LAYOUTMAP_CORE_SERVED_KEYS_KEY_PIECES_H_
#define TF_LAYOUTMAP_CORE_SERVED_KEYS_KEY_PIECES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/policy.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/served_keys/key_messages.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/core/vocabulary/admit_keys.h"
#include "cc/core/vocabulary/first_rows.h"

namespace layoutmap {

// A shard of a table with an open vocabulary. It consists of complete segments,
// so that the handling of a key does not depend on other shards.
struct KeyPiece {
  std::string table;
  BucketLayout layout;       // layout of the full vocabulary
  int64_t first_bucket = 0;  // first bucket of the shard
  int64_t num_buckets = 0;
  // Whether the last row of the shard is shared by unknown keys.
  bool has_unknown_row = false;
  VocabularyPolicy policy;

  int64_t first_row() const { return first_bucket * kKeysPerBucket; }
};

// Returns an error unless the shard consists of complete segments.
Status CheckKeyPiece(const KeyPiece& piece);

// Creates a partition of a vocabulary or table of `size` rows or buckets into
// three shards. The middle shard, [first, first + count), is on this server;
// the other shards have no memory.
Status PartOf(int64_t size, int64_t first, int64_t count,
              RowPartition* partition);

// The arguments and results of a step for one piece. The views use partitions
// from `PartOf`.
struct KeyPieceStep {
  VocabularyState state;              // used by training steps
  FirstRows first_rows;               // used by steps that may insert keys
  ShardedView<const int64_t> stored;  // the keys, for steps that only find rows
  const PieceKeys* keys = nullptr;
  // The latest step of the vocabulary before this step, and how many steps ago
  // the oldest pending step began.
  int32_t last_step = 0;
  int64_t oldest_age = 0;
  // Results.
  std::vector<uint32_t> rows;  // row of each key in the shard, or kNoPlace
  VocabularyCounts counts;
};

// Returns an error if a key belongs to another shard.
Status CheckKeysOf(const KeyPiece& piece, Span<const int64_t> keys);

// Runs a training step: counts the keys of all pieces, inserts new keys, and
// writes their rows. The state equals the state of a single-process vocabulary
// after the same step. If a key has no free row and the policy makes this an
// error, all pieces stay unchanged.
Status AdmitToPieces(const std::vector<KeyPiece>& pieces,
                     const ParallelFor& parallel_for,
                     std::vector<KeyPieceStep>* steps);

// Finds the rows of keys without changing the state.
void FindInPieces(const std::vector<KeyPiece>& pieces,
                  const ParallelFor& parallel_for,
                  std::vector<KeyPieceStep>* steps);

// Pins the rows that the keys of a repeated closure have. The step of the
// closure began `age` steps ago. Uses are not counted again.
void PinInPieces(const std::vector<KeyPiece>& pieces, int64_t age,
                 std::vector<KeyPieceStep>* steps);

// Returns the rows of a piece to send, ascending and without duplicates.
std::vector<uint32_t> RowsToSend(const KeyPiece& piece,
                                 const KeyPieceStep& step);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVED_KEYS_KEY_PIECES_H_
