// Messages between a worker and a server in a step. There is one byte tensor in
// each direction for all tables, because each tensor that is sent between
// processes is a separate call.
//
// A piece is a shard of a table on the server. Pieces are numbered by table,
// then by shard.
//
//   fetch    value type, number of rows of each piece (4 bytes each);
//            the rows of all pieces (wire.h)
//   fetched  num_updates (8 bytes); the values of all rows
//   apply    epoch, number, attempt, num_updates (8 bytes each); value type,
//            number of rows of each piece, hyperparameters of each piece
//            (4 bytes each); gradients of all rows; the rows
//
// Rows and gradients are float32 or bfloat16, as configured on the worker;
// hyperparameters are float32. All values have the byte order of the processor
// and are aligned, so that they can be read in place.

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

// Offset of the values in a `fetched` message.
constexpr int64_t kFetchedHeader = 8;

void WriteNumUpdates(int64_t num_updates, uint8_t* header);
int64_t ReadNumUpdates(const uint8_t* header);

// The header of an `apply` message.
struct ApplyHeader {
  static constexpr int64_t kNumBytes = 32;

  ClosureToken token;
  int64_t num_updates = 0;  // number of updates at the fetch
};

// Size of the value type and the number of rows of each piece.
int64_t CountsBytes(int64_t num_pieces);
void WriteCounts(RowType wire, const std::vector<uint32_t>& counts,
                 uint8_t* bytes);

// Writes a `fetch` message.
struct FetchWriter {
  RowType wire = RowType::kFloat32;
  std::vector<uint32_t> counts;  // number of rows, by piece
  std::vector<uint8_t> rows;

  int64_t size() const;
  // Writes `size()` bytes.
  void Write(uint8_t* bytes) const;
};

// Writes an `apply` message without its gradients.
struct ApplyWriter {
  ApplyHeader header;
  RowType wire = RowType::kFloat32;
  std::vector<uint32_t> counts;        // number of rows, by piece
  std::vector<float> hyperparameters;  // values of all pieces
  int64_t num_values = 0;              // number of gradient values
  std::vector<uint8_t> rows;

  int64_t size() const;
  // Writes `size()` bytes, except for the gradients. Returns the address for
  // the gradients.
  uint8_t* Write(uint8_t* bytes) const;
};

// The properties of a piece that a message is checked against.
struct PieceSize {
  std::string table;
  int64_t num_rows = 0;
  int64_t dim = 0;
  int64_t num_hyperparameters = 0;
};

// A message to a server. Its memory must be aligned to 8 bytes. `Read` returns
// an error unless the message matches the pieces and all rows are in range.
struct FetchMessage {
  RowType wire = RowType::kFloat32;
  std::vector<std::vector<uint32_t>> rows;  // by piece, ascending

  Status Read(Span<const uint8_t> bytes, const std::vector<PieceSize>& sizes);
};

struct ApplyMessage {
  ApplyHeader header;
  RowType wire = RowType::kFloat32;
  std::vector<std::vector<uint32_t>> rows;
  std::vector<Span<const float>> hyperparameters;  // by piece
  // Gradients of all pieces, [rows, dim] each, in one of the two spans,
  // depending on `wire`.
  Span<const float> gradients;
  Span<const uint16_t> half_gradients;

  Status Read(Span<const uint8_t> bytes, const std::vector<PieceSize>& sizes);
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVERS_MESSAGES_H_
