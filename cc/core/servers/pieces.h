// The server side of a step. A server reads rows and updates rows.

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

// A shard of a table on a server. Each shard is processed independently of
// other shards. Results are bitwise identical for every partition, because the
// update of a row depends only on the row and its gradient. The update of a
// 16-bit row also depends on the index of the row in the full table.
struct Piece {
  std::string table;
  // Index of the table in the embedding.
  int64_t table_number = 0;
  // Index of the shard's first row in the full table.
  int64_t first_row = 0;
  int64_t dim = 0;
  RowType row_type = RowType::kFloat32;
  Optimizer optimizer = Optimizer::kNone;
  int64_t num_hyperparameters = 0;
};

// The rows to read from one piece. The rows are in `table` or in `half_table`.
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

// Returns the number of values that `FetchRows` writes.
int64_t NumValues(const std::vector<PieceRead>& reads);

// Reads the rows of all pieces in order, and writes them as floats. 16-bit
// values are converted.
void FetchRows(const std::vector<PieceRead>& reads, const RowKernels& kernels,
               const ParallelFor& parallel_for, float* out);

// Reads the rows of all pieces in order, and writes them as bfloat16. Values of
// type float32 and float16 are rounded to nearest.
void FetchRows(const std::vector<PieceRead>& reads, const RowKernels& kernels,
               const ParallelFor& parallel_for, uint16_t* out);

// The arguments of the update of one piece.
struct PieceUpdate {
  ShardedView<float> table;
  ShardedView<uint16_t> half_table;
  // Number of earlier updates. The rounding of 16-bit rows depends on it.
  uint64_t num_updates = 0;
  std::vector<ShardedView<float>> slots;
  // The rows in ascending order. If the update rule applies one step per
  // contribution, a row may occur several times, with one contribution each
  // time.
  Span<const uint32_t> rows;
  Span<const float> hyperparameters;
  Span<const float> gradients;  // [rows.size(), dim]
};

// Sets the rows, the hyperparameters and the gradients of each update. `values`
// are the gradients in the message, converted to floats. If a hyperparameter is
// invalid, returns an error and changes nothing.
Status ReadUpdates(const std::vector<Piece>& pieces,
                   const ApplyMessage& message, Span<const float> values,
                   std::vector<PieceUpdate>* updates);

// Applies one step of the update rule to each row.
void ApplyUpdates(const std::vector<Piece>& pieces,
                  const std::vector<PieceUpdate>& updates,
                  uint64_t rounding_seed, const RowKernels& kernels,
                  const ParallelFor& parallel_for);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVERS_PIECES_H_
