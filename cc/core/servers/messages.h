// What a worker and a server say to each other in a step: one tensor of words
// and one of floats, whatever the number of tables, because each tensor that
// goes from process to process is a call of its own.
//
// A piece is a shard of a table that is on the server. Pieces are numbered by
// table, then by shard.
//
//   fetch    words   number of rows of each piece, rows of all pieces
//            floats  num_updates (2 floats, bit by bit), rows of all pieces
//   apply    words   epoch, number, attempt, num_updates (2 words each), number
//                    of rows of each piece, rows of all pieces
//            floats  hyperparameters of all pieces, gradients of all pieces

#ifndef TF_LAYOUTMAP_CORE_SERVERS_MESSAGES_H_
#define TF_LAYOUTMAP_CORE_SERVERS_MESSAGES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/servers/applied_closures.h"

namespace layoutmap {

// Floats before the rows of a fetch.
constexpr int64_t kFetchedHeader = 2;

void WriteNumUpdates(int64_t num_updates, float* header);
int64_t ReadNumUpdates(const float* header);

// What precedes the rows of an apply.
struct ApplyHeader {
  static constexpr int64_t kNumWords = 8;

  ClosureToken token;
  int64_t num_updates = 0;  // when the rows were fetched
};

void WriteHeader(const ApplyHeader& header, std::vector<uint32_t>* words);

// Of an apply: its header, and the words that follow.
Status ReadHeader(Span<const uint32_t> words, ApplyHeader* header,
                  Span<const uint32_t>* rest);

// What a message says of rows needs to be checked against.
struct PieceSize {
  std::string table;
  int64_t num_rows = 0;
};

// The rows of each piece, refused unless all of them are rows of it.
Status ReadRows(Span<const uint32_t> words, const std::vector<PieceSize>& sizes,
                std::vector<Span<const uint32_t>>* rows);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVERS_MESSAGES_H_
