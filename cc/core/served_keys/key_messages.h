// Messages between a worker and a server for tables with open vocabularies: the
// worker sends keys, and the server determines their rows.
//
//   fetch    epoch, number, attempt, whether the step trains (8 bytes each);
//            value type, for each piece the number of its rows or keys and the
//            kind of its keys (4 bytes each), padding to a multiple of 8 bytes;
//            the keys of all pieces (8 bytes each), in the order of their first
//            use; for each piece its rows, or the number of uses of each key
//            (wire.h)
//   fetched  a ticket (8 bytes); the row of each key in its shard, or kNoPlace
//            (4 bytes), padding to a multiple of 8 bytes; the values of the
//            rows of all pieces, ascending and without duplicates. If unknown
//            keys share a row, it is the last row of its shard and is always
//            sent, because the worker does not know in advance whether it is
//            needed.
//   apply    as in messages.h, with the ticket instead of num_updates

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

// The value that is sent instead of a row for a key without a row.
constexpr uint32_t kNoPlace = UINT32_MAX;
// The maximum number of uses of all keys of a fetch.
constexpr int64_t kMaxUses = int64_t{1} << 28;

// The unique keys of one piece, in the order of their first use.
struct PieceKeys {
  std::vector<int64_t> keys;
  std::vector<uint32_t> times;  // number of uses of each key
};

// The request for a piece: rows, or keys if its table has an open vocabulary.
struct KeyFetchWriter {
  ClosureToken token;
  bool training = false;
  RowType wire = RowType::kFloat32;
  struct Asked {
    uint32_t count = 0;
    uint32_t kind = 0;             // kind of the keys
    std::vector<int64_t> keys;     // keys of an open table
    std::vector<uint8_t> compact;  // rows, or numbers of uses of keys
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
  std::vector<std::vector<uint32_t>> rows;  // ascending rows of closed pieces
  std::vector<PieceKeys> keys;              // keys of open pieces
  std::vector<uint32_t> kinds;              // kinds of the keys

  // Returns whether the message belongs to a training step. The message may be
  // unchecked.
  static bool IsTraining(Span<const uint8_t> bytes);

  // Returns an error unless the message matches the pieces. `is_open` contains
  // for each piece whether its table has an open vocabulary.
  Status Read(Span<const uint8_t> bytes, const std::vector<PieceSize>& sizes,
              const std::vector<bool>& is_open);
};

// Returns the offset of the values in a `fetched` message with `num_keys` keys.
int64_t FetchedKeysHeader(int64_t num_keys);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVED_KEYS_KEY_MESSAGES_H_
