// Messages between a worker and a server in a step. A message is one byte
// tensor for all tables, because TensorFlow sends each tensor between processes
// in a separate call.
//
// A piece is a shard of a table on the server. The pieces are ordered by table,
// then by shard.
//
// A `fetch` message contains, in this order:
//
//   * The value type and the number of rows of each piece (4 bytes each).
//   * The rows of all pieces, encoded as in wire.h.
//
// A `fetched` message contains, in this order:
//
//   * The number of updates, num_updates (8 bytes).
//   * The values of all rows.
//
// An `apply` message contains, in this order:
//
//   * The epoch, the number and the attempt of the closure, and num_updates
//     (8 bytes each).
//   * The value type, the number of rows of each piece, and the hyperparameters
//     of each piece (4 bytes each).
//   * The gradients of all rows.
//   * The rows of all pieces, encoded as in wire.h.
//
// A `joined` message contains, in this order:
//
//   * The size of the `apply` message in bytes (8 bytes).
//   * An `apply` message, followed by zeros up to a multiple of 8 bytes.
//   * A `fetch` message.
//
// A `bundle` contains messages to several embeddings on the same server, in
// this order:
//
//   * The size of each message in bytes (8 bytes each).
//   * The messages, each followed by zeros up to a multiple of 8 bytes.
//
// The values of rows and gradients are float32 or bfloat16, depending on the
// configuration of the worker. Hyperparameters are float32. All values have the
// byte order of the processor and are aligned, so that the code can read them
// in place.

#ifndef TF_LAYOUTMAP_CORE_SERVERS_MESSAGES_H_
#define TF_LAYOUTMAP_CORE_SERVERS_MESSAGES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cc/core/base/row_type.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/servers/applied_closures.h"

namespace layoutmap {

// Offset of the row values in a `fetched` message, in bytes.
constexpr int64_t kFetchedHeader = 8;
// The number of updates in an update whose rows were read in another way. The
// server then counts the staleness 0.
constexpr int64_t kUnknownNumUpdates = -1;

void WriteNumUpdates(int64_t num_updates, uint8_t* header);
int64_t ReadNumUpdates(const uint8_t* header);

// The header of an `apply` message.
struct ApplyHeader {
  static constexpr int64_t kNumBytes = 32;

  ClosureToken token;
  // Number of updates at the time of the fetch.
  int64_t num_updates = 0;
};

// Returns the size in bytes of the value type and of the numbers of rows.
int64_t CountsBytes(int64_t num_pieces);
void WriteCounts(RowType wire, const std::vector<uint32_t>& counts,
                 uint8_t* bytes);

// Writes a `fetch` message.
struct FetchWriter {
  RowType wire = RowType::kFloat32;
  std::vector<uint32_t> counts;  // Number of rows of each piece.
  std::vector<uint8_t> rows;

  int64_t size() const;
  // Writes `size()` bytes.
  void Write(uint8_t* bytes) const;
};

// Writes an `apply` message without its gradients.
struct ApplyWriter {
  ApplyHeader header;
  RowType wire = RowType::kFloat32;
  std::vector<uint32_t> counts;  // Number of rows of each piece.
  // The hyperparameters of all pieces.
  std::vector<float> hyperparameters;
  // Number of gradient values.
  int64_t num_values = 0;
  std::vector<uint8_t> rows;

  int64_t size() const;
  // Writes a message of `size()` bytes, except for its gradients. Returns the
  // address at which the caller must write the gradients.
  uint8_t* Write(uint8_t* bytes) const;
};

// The properties of a piece that a message must match.
struct PieceSize {
  std::string table;
  int64_t num_rows = 0;
  int64_t dim = 0;
  int64_t num_hyperparameters = 0;
};

// A `fetch` message that a server has received. The memory of the message must
// be aligned to 8 bytes. `Read` returns an error if the message does not match
// the pieces or if a row is out of range.
struct FetchMessage {
  RowType wire = RowType::kFloat32;
  // The rows of each piece, in ascending order.
  std::vector<std::vector<uint32_t>> rows;

  Status Read(Span<const uint8_t> bytes, const std::vector<PieceSize>& sizes);
};

struct ApplyMessage {
  ApplyHeader header;
  RowType wire = RowType::kFloat32;
  std::vector<std::vector<uint32_t>> rows;
  // The hyperparameters of each piece.
  std::vector<Span<const float>> hyperparameters;
  // The gradients of all pieces, [num_rows, dim] for each piece. Depending on
  // `wire`, one of the two spans contains the gradients, and the other span is
  // empty.
  Span<const float> gradients;
  Span<const uint16_t> half_gradients;

  Status Read(Span<const uint8_t> bytes, const std::vector<PieceSize>& sizes);
};

// Returns the size in bytes of a `joined` message.
int64_t JoinedBytes(int64_t apply_bytes, int64_t fetch_bytes);
// Writes a `joined` message, except for its `apply` message. Returns the
// address at which the caller must write the `apply` message.
uint8_t* WriteJoined(int64_t apply_bytes, Span<const uint8_t> fetch,
                     uint8_t* bytes);

// The two parts of a `joined` message that a server has received. `Read`
// returns an error if the message is too short.
struct JoinedMessage {
  Span<const uint8_t> apply;
  Span<const uint8_t> fetch;

  Status Read(Span<const uint8_t> bytes);
};

// Returns the size in bytes of a `bundle`.
int64_t BundleBytes(const std::vector<Span<const uint8_t>>& messages);
// Writes a `bundle` of `BundleBytes(messages)` bytes.
void WriteBundle(const std::vector<Span<const uint8_t>>& messages,
                 uint8_t* bytes);
// Finds the messages in a `bundle` that a server has received. Returns an error
// if the bundle does not contain `num_messages` messages.
Status ReadBundle(Span<const uint8_t> bytes, int64_t num_messages,
                  std::vector<Span<const uint8_t>>* messages);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVERS_MESSAGES_H_
