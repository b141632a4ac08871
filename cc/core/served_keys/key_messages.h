// Messages between a worker and a server for tables with open vocabularies. The
// worker sends keys, and the server determines the rows of the keys.
//
// A `fetch` message contains, in this order:
//
//   * The epoch, the number and the attempt of the closure (8 bytes each). Then
//     0 if the step is forward-only. Otherwise, 1 for the first lookup of the
//     closure's step, 2 for the second lookup, and so on (8 bytes).
//   * The value type (4 bytes). Then the number of rows or keys of each piece,
//     and the kind of the keys of each piece (4 bytes each). Then padding to a
//     multiple of 8 bytes.
//   * The keys of all pieces (8 bytes each), in the order of their first use.
//   * For each piece, its rows or the number of uses of each key, encoded as in
//     wire.h.
//
// A `fetched` message contains, in this order:
//
//   * The ticket of the step (8 bytes).
//   * The row of each key in its shard, or kNoPlace (4 bytes each). Then
//   padding
//     to a multiple of 8 bytes.
//   * The values of the rows of all pieces. The rows of a piece are ascending
//     and have no duplicates. If unknown keys share a row, this row is the last
//     row of its shard. The server always sends this row, because the worker
//     does not know in advance whether it needs the row.
//
// An `apply` message is the same as in messages.h, except that it contains the
// ticket instead of num_updates.

#ifndef TF_LAYOUTMAP_CORE_SERVED_KEYS_KEY_MESSAGES_H_
#define TF_LAYOUTMAP_CORE_SERVED_KEYS_KEY_MESSAGES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/core/base/row_type.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/servers/applied_closures.h"
#include "cc/core/servers/messages.h"

namespace layoutmap {

// The value that a server sends instead of a row if a key has no row.
constexpr uint32_t kNoPlace = UINT32_MAX;
// The maximum number of key uses in one `fetch` message.
constexpr int64_t kMaxUses = int64_t{1} << 28;

// The unique keys of one piece, in the order of the first use of each key.
struct PieceKeys {
  std::vector<int64_t> keys;
  // Number of uses of each key.
  std::vector<uint32_t> times;
};

// Writes a `fetch` message. The request for a piece contains keys if the table
// has an open vocabulary, and rows otherwise.
struct KeyFetchWriter {
  ClosureToken token;
  bool training = false;
  RowType wire = RowType::kFloat32;
  struct Asked {
    uint32_t count = 0;
    // The kind of the keys.
    uint32_t kind = 0;
    // The keys of a piece with an open vocabulary.
    std::vector<int64_t> keys;
    // The encoded rows, or the encoded numbers of uses of the keys.
    std::vector<uint8_t> compact;
  };
  std::vector<Asked> pieces;

  int64_t size() const;
  // Writes `size()` bytes.
  void Write(uint8_t* bytes) const;
};

struct KeyFetchMessage {
  ClosureToken token;
  bool training = false;
  RowType wire = RowType::kFloat32;
  // For each piece without an open vocabulary, its rows in ascending order.
  std::vector<std::vector<uint32_t>> rows;
  // For each piece with an open vocabulary, its keys.
  std::vector<PieceKeys> keys;
  // The kind of the keys of each piece.
  std::vector<uint32_t> kinds;

  // Returns whether the message belongs to a training step. This function can
  // be called before `Read` has checked the message.
  static bool IsTraining(Span<const uint8_t> bytes);

  // Returns an error if the message does not match the pieces. `is_open` has
  // one value per piece, which is true if the table has an open vocabulary.
  Status Read(Span<const uint8_t> bytes, const std::vector<PieceSize>& sizes,
              const std::vector<bool>& is_open);
};

// Returns the offset of the values in a `fetched` message with `num_keys` keys.
int64_t FetchedKeysHeader(int64_t num_keys);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVED_KEYS_KEY_MESSAGES_H_
