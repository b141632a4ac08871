// What a worker and a server say to each other in a step: one tensor of bytes
// each way, whatever the number of tables, because each tensor that goes from
// process to process is a call of its own.
//
// A piece is a shard of a table that is on the server. Pieces are numbered by
// table, then by shard.
//
//   fetch    type of values, number of rows of each piece (4 bytes each); the
//            rows of all pieces (wire.h)
//   fetched  num_updates (8 bytes); the values of all rows
//   apply    epoch, number, attempt, num_updates (8 bytes each); type of
//   values,
//            number of rows of each piece, hyperparameters of each piece
//            (4 bytes each); gradients of all rows; the rows
//
// Values, of rows and gradients, are float32 or bfloat16, as the worker has it;
// hyperparameters are float32. All is in the byte order of the processors, and
// as far into its message that it can be read where it is.

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

// Bytes before the values that were fetched.
constexpr int64_t kFetchedHeader = 8;

void WriteNumUpdates(int64_t num_updates, uint8_t* header);
int64_t ReadNumUpdates(const uint8_t* header);

// What an apply begins with.
struct ApplyHeader {
  static constexpr int64_t kNumBytes = 32;

  ClosureToken token;
  int64_t num_updates = 0;  // when the rows were fetched
};

// Type of values, and number of rows of each piece.
int64_t CountsBytes(int64_t num_pieces);
void WriteCounts(RowType wire, const std::vector<uint32_t>& counts,
                 uint8_t* bytes);

// All of a fetch.
struct FetchWriter {
  RowType wire = RowType::kFloat32;
  std::vector<uint32_t> counts;  // of each piece
  std::vector<uint8_t> rows;

  int64_t size() const;
  // Writes `size()` bytes.
  void Write(uint8_t* bytes) const;
};

// All of an apply but its gradients.
struct ApplyWriter {
  ApplyHeader header;
  RowType wire = RowType::kFloat32;
  std::vector<uint32_t> counts;        // of each piece
  std::vector<float> hyperparameters;  // of all pieces
  int64_t num_values = 0;              // of all gradients
  std::vector<uint8_t> rows;

  int64_t size() const;
  // Writes `size()` bytes but the gradients; returns where those go.
  uint8_t* Write(uint8_t* bytes) const;
};

// What a message is checked against.
struct PieceSize {
  std::string table;
  int64_t num_rows = 0;
  int64_t dim = 0;
  int64_t num_hyperparameters = 0;
};

// A message to a server, which begins where 8 bytes can be read at once.
// Refused unless it is what the pieces ask for, and all rows are rows of them.
struct FetchMessage {
  RowType wire = RowType::kFloat32;
  std::vector<std::vector<uint32_t>> rows;  // of each piece, ascending

  Status Read(Span<const uint8_t> bytes, const std::vector<PieceSize>& sizes);
};

struct ApplyMessage {
  ApplyHeader header;
  RowType wire = RowType::kFloat32;
  std::vector<std::vector<uint32_t>> rows;
  std::vector<Span<const float>> hyperparameters;  // of each piece
  // Of all pieces, [rows, dim] of each: one of the two, as `wire` has it.
  Span<const float> gradients;
  Span<const uint16_t> half_gradients;

  Status Read(Span<const uint8_t> bytes, const std::vector<PieceSize>& sizes);
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVERS_MESSAGES_H_
