// What a server does with keys: it finds their rows, and gives new ones rows.

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

// A shard of a table with an open vocabulary. It has whole segments, so what
// happens to a key depends on no other shard.
struct KeyPiece {
  std::string table;
  BucketLayout layout;       // of the whole vocabulary
  int64_t first_bucket = 0;  // of the shard
  int64_t num_buckets = 0;
  // Whether it ends with the row that unknown keys share.
  bool has_unknown_row = false;
  VocabularyPolicy policy;

  int64_t first_row() const { return first_bucket * kKeysPerBucket; }
};

// Refuses a shard that has not whole segments.
Status CheckKeyPiece(const KeyPiece& piece);

// A vocabulary or table of `size`, of which the middle one of three shards is
// here: the others have no memory.
Status PartOf(int64_t size, int64_t first, int64_t count,
              RowPartition* partition);

// What a step works on in one piece: views of all buckets or rows, by `PartOf`.
struct KeyPieceStep {
  VocabularyState state;              // of a training step
  FirstRows first_rows;               // of one that may give keys rows
  ShardedView<const int64_t> stored;  // the keys, where rows are only found
  const PieceKeys* keys = nullptr;
  // The vocabulary's step before this one, and how many steps ago the oldest
  // one began that is awaited.
  int32_t last_step = 0;
  int64_t oldest_age = 0;
  // What came of it.
  std::vector<uint32_t> rows;  // of each key, in the shard; kNoPlace for none
  VocabularyCounts counts;
};

// Refuses keys that belong to another shard.
Status CheckKeysOf(const KeyPiece& piece, Span<const int64_t> keys);

// A training step: counts the keys of all pieces, gives new ones rows, and
// writes these. The state is that of a vocabulary in one process after the same
// step. If a key of one piece finds no place and that is an error, nothing has
// changed in any.
Status AdmitToPieces(const std::vector<KeyPiece>& pieces,
                     const ParallelFor& parallel_for,
                     std::vector<KeyPieceStep>* steps);

// Finds the rows of keys, and changes nothing.
void FindInPieces(const std::vector<KeyPiece>& pieces,
                  const ParallelFor& parallel_for,
                  std::vector<KeyPieceStep>* steps);

// Pins the rows that a closure found when it came again, whose step began so
// many steps ago: it counts no use.
void PinInPieces(const std::vector<KeyPiece>& pieces, int64_t age,
                 std::vector<KeyPieceStep>* steps);

// The rows of a piece to send, each once, ascending.
std::vector<uint32_t> RowsToSend(const KeyPiece& piece,
                                 const KeyPieceStep& step);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVED_KEYS_KEY_PIECES_H_
