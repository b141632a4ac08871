// The server's half of a step: it reads rows, and updates them.

#ifndef TF_LAYOUTMAP_CORE_SERVERS_PIECES_H_
#define TF_LAYOUTMAP_CORE_SERVERS_PIECES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/servers/messages.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/tables/sharded_view.h"

namespace layoutmap {

// A shard of a table on a server, which knows nothing of the other shards. A
// row is the same to the bit, whatever the cut: what its update depends on is
// the row, its gradient, and for 16-bit rows its place in the whole table.
struct Piece {
  std::string table;
  int64_t table_number = 0;  // among all tables of the embedding
  int64_t first_row = 0;     // of the shard, in the table
  int64_t dim = 0;
  RowType row_type = RowType::kFloat32;
  Optimizer optimizer = Optimizer::kNone;
  int64_t num_hyperparameters = 0;
};

// Rows to read of one piece: of `table`, or of `half_table`.
struct PieceRead {
  ShardedView<const float> table;
  ShardedView<const uint16_t> half_table;
  RowType row_type = RowType::kFloat32;
  Span<const uint32_t> rows;

  int64_t dim() const {
    return row_type == RowType::kFloat32 ? table.dim : half_table.dim;
  }
  int64_t num_values() const { return rows.size() * dim(); }
};

// Values that `FetchRows` writes.
int64_t NumValues(const std::vector<PieceRead>& reads);

// The rows of one piece after the other, as floats: 16 bits are expanded.
void FetchRows(const std::vector<PieceRead>& reads, const RowKernels& kernels,
               const ParallelFor& parallel_for, float* out);

// The same as bfloat16: values of float32 and float16 become the nearest one.
void FetchRows(const std::vector<PieceRead>& reads, const RowKernels& kernels,
               const ParallelFor& parallel_for, uint16_t* out);

// What the update of one piece works on.
struct PieceUpdate {
  ShardedView<float> table;
  ShardedView<uint16_t> half_table;
  uint64_t num_updates = 0;  // of a table with 16-bit rows, before this one
  std::vector<ShardedView<float>> slots;
  // Ascending. A row that comes again has a further contribution, for rules
  // that take one step for each.
  Span<const uint32_t> rows;
  Span<const float> hyperparameters;
  Span<const float> gradients;  // [rows.size(), dim]
};

// Gives each update its rows, hyperparameters and gradients, `values`: those of
// the message, as floats. Refused, before anything is written, if a
// hyperparameter is no good.
Status ReadUpdates(const std::vector<Piece>& pieces,
                   const ApplyMessage& message, Span<const float> values,
                   std::vector<PieceUpdate>* updates);

// One step of its rule on each row.
void ApplyUpdates(const std::vector<Piece>& pieces,
                  const std::vector<PieceUpdate>& updates,
                  uint64_t rounding_seed, const RowKernels& kernels,
                  const ParallelFor& parallel_for);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVERS_PIECES_H_
