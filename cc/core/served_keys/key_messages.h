// What a worker and a server say to each other where tables have open
// vocabularies: the worker knows keys, and the server the rows of them.
//
//   fetch    epoch, number, attempt, whether the step trains (8 bytes each);
//            type of values, for each piece the number of its rows or keys and
//            what its keys are made of (4 bytes each), and nothing up to a
//            multiple of 8 bytes; the keys of all pieces (8 bytes each), in the
//            order of their first use; for each piece its rows, or how often
//            each key is used (wire.h)
//   fetched  a ticket (8 bytes); the row of each key in its shard, or kNoPlace
//            (4 bytes), and nothing up to a multiple of 8 bytes; the values of
//            the rows of all pieces, each row once, ascending. The row of
//            unknown keys comes last in its shard where they share one,
//            whether it is needed or not: a worker learns that only now.
//   apply    that of messages.h, with the ticket for num_updates

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

// The row of a key that has none.
constexpr uint32_t kNoPlace = UINT32_MAX;
// How often all keys of a fetch may be used together.
constexpr int64_t kMostUses = int64_t{1} << 28;

// The keys of one piece, each once, in the order of their first use.
struct PieceKeys {
  std::vector<int64_t> keys;
  std::vector<uint32_t> times;  // how often each is used
};

// What a piece is asked for: rows, or keys where its table is open.
struct KeyFetchWriter {
  ClosureToken token;
  bool training = false;
  RowType wire = RowType::kFloat32;
  struct Asked {
    uint32_t count = 0;
    uint32_t kind = 0;             // what the keys are made of
    std::vector<int64_t> keys;     // of an open table
    std::vector<uint8_t> compact;  // rows, or uses of keys
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
  std::vector<std::vector<uint32_t>> rows;  // of closed pieces, ascending
  std::vector<PieceKeys> keys;              // of open pieces
  std::vector<uint32_t> kinds;              // of open pieces

  // Whether it is of a step that trains, as far as it can be told yet.
  static bool IsTraining(Span<const uint8_t> bytes);

  // Refused unless it is what the pieces ask for; `is_open` says of each
  // whether its table has an open vocabulary.
  Status Read(Span<const uint8_t> bytes, const std::vector<PieceSize>& sizes,
              const std::vector<bool>& is_open);
};

// How far the values of a `fetched` with so many keys are into it.
int64_t FetchedKeysHeader(int64_t num_keys);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVED_KEYS_KEY_MESSAGES_H_
