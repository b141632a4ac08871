// Operations of a server on keys. A server finds the rows of keys and inserts
// new keys.

#ifndef TF_LAYOUTMAP_CORE_SERVED_KEYS_KEY_PIECES_H_
#define TF_LAYOUTMAP_CORE_SERVED_KEYS_KEY_PIECES_H_

#include <cstdint>
#include <functional>
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

// A shard of a table with an open vocabulary. The shard consists of complete
// segments, so that the server can process a key without data from other
// shards.
struct KeyPiece {
  std::string table;
  // Layout of the full vocabulary.
  BucketLayout layout;
  // Index of the first bucket of the shard.
  int64_t first_bucket = 0;
  int64_t num_buckets = 0;
  // Whether the last row of the shard is the row that unknown keys share.
  bool has_unknown_row = false;
  VocabularyPolicy policy;
  // Index, in the list of pieces, of the piece whose vocabulary this piece
  // uses, or -1 if the piece owns its vocabulary. Both pieces have the same
  // buckets, and a key has the same row in both pieces.
  int32_t owner = -1;

  bool is_owner() const { return owner < 0; }
  int64_t first_row() const { return first_bucket * kKeysPerBucket; }
};

// Returns an error if the shard does not consist of complete segments.
Status CheckKeyPiece(const KeyPiece& piece);

// Creates a partition of a vocabulary or a table with `size` buckets or rows
// into three shards. The second shard, [first, first + count), is on this
// server. The first and third shards have no memory.
Status PartOf(int64_t size, int64_t first, int64_t count,
              RowPartition* partition);

// The arguments and the results of a step for one piece. The views use
// partitions that `PartOf` created.
struct KeyPieceStep {
  // Used by training steps. Pieces that share a vocabulary have views of the
  // same memory.
  VocabularyState state;
  // Used by steps that can insert keys.
  FirstRows first_rows;
  // The stored keys. Used by steps that only find rows.
  ShardedView<const int64_t> stored;
  const PieceKeys* keys = nullptr;
  // The number of the vocabulary step before this step, and how many steps ago
  // the oldest pending step began.
  int32_t last_step = 0;
  int64_t oldest_age = 0;
  // A function that receives the new keys of the piece's vocabulary before
  // their rows are written. It is called after the keys of all pieces are
  // admitted. If it returns an error, the step changes nothing. May be empty.
  std::function<Status(Span<const NewKey>)> before_first_rows;
  // The results of the step.
  // Row of each key in the shard, or kNoPlace.
  std::vector<uint32_t> rows;
  // Rows of the keys that the step inserted. Set only if another piece owns the
  // vocabulary.
  std::vector<uint32_t> new_rows;
  // Set only if the piece owns its vocabulary.
  VocabularyCounts counts;
};

// Returns an error if a key belongs to another shard.
Status CheckKeysOf(const KeyPiece& piece, Span<const int64_t> keys);

// Runs a training step, which counts the keys of all pieces, inserts new keys,
// and writes the rows of the new keys. If several pieces share a vocabulary,
// the step counts their keys once (see `MergeKeys`), and writes the rows of the
// new keys in all of these pieces. The resulting state equals the state of a
// single-process vocabulary after the same step. If a key has no free row and
// `fails_when_full` is set, or if `before_first_rows` of a piece fails, returns
// an error and leaves all pieces unchanged.
Status AdmitToPieces(const std::vector<KeyPiece>& pieces,
                     const ParallelFor& parallel_for,
                     std::vector<KeyPieceStep>* steps);

// Finds the rows of keys without changing the state.
void FindInPieces(const std::vector<KeyPiece>& pieces,
                  const ParallelFor& parallel_for,
                  std::vector<KeyPieceStep>* steps);

// Pins the rows of the keys in a closure that runs again. The earlier run of
// the closure began `age` steps ago. The uses of the keys are not counted
// again.
void PinInPieces(const std::vector<KeyPiece>& pieces, int64_t age,
                 std::vector<KeyPieceStep>* steps);

// Returns the rows of a piece that the server must send, in ascending order and
// without duplicates.
std::vector<uint32_t> RowsToSend(const KeyPiece& piece,
                                 const KeyPieceStep& step);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVED_KEYS_KEY_PIECES_H_
