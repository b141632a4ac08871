#include "cc/core/servers/pieces.h"

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/optimizers/apply.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/servers/messages.h"
#include "cc/core/servers/wire.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/tables/gather.h"
#include "cc/core/tables/half_table.h"
#include "cc/core/tables/sharded_view.h"

namespace layoutmap {

namespace {

// Number of rows that are processed at a time.
constexpr int64_t kTile = 256;

void ExpandRows(const PieceRead& read, const RowKernels& kernels, int64_t begin,
                int64_t end, float* out) {
  std::vector<const uint16_t*> row_of(kTile + kAhead);
  const int64_t dim = read.dim();
  for (; begin < end; begin += kTile) {
    const int64_t size = std::min(kTile, end - begin);
    for (int64_t i = 0; i < size; ++i) {
      row_of[i] = read.half_table.row(read.rows[begin + i]);
    }
    // The kernel prefetches beyond the last row, so the additional elements of
    // `row_of` must be valid addresses.
    std::fill_n(row_of.begin() + size, kAhead, row_of[0]);
    ExpandArgs args;
    args.row_type = read.row_type;
    args.row_of = row_of.data();
    args.num_rows = size;
    args.dim = dim;
    args.rows = out + begin * dim;
    kernels.expand(args);
  }
}

// The unique rows of an update, and the gradients of each row.
struct Grouped {
  std::vector<uint32_t> rows;
  std::vector<int64_t> splits{0};
  std::vector<uint32_t> gradient_of;
  std::vector<const float*> gradient_rows;
};

Grouped Group(const PieceUpdate& update, int64_t dim) {
  Grouped grouped;
  const int64_t count = update.rows.size();
  grouped.gradient_of.resize(count);
  std::iota(grouped.gradient_of.begin(), grouped.gradient_of.end(), 0);
  grouped.gradient_rows.reserve(count);
  grouped.rows.reserve(count);
  grouped.splits.reserve(count + 1);
  for (int64_t i = 0; i < count; ++i) {
    grouped.gradient_rows.push_back(update.gradients.data() + i * dim);
    if (i + 1 < count && update.rows[i] == update.rows[i + 1]) continue;
    grouped.rows.push_back(update.rows[i]);
    grouped.splits.push_back(i + 1);
  }
  return grouped;
}

// Reads rows and converts them to bfloat16, one tile at a time.
void NarrowRows(const PieceRead& read, const RowKernels& kernels, int64_t begin,
                int64_t end, uint16_t* out) {
  const int64_t dim = read.dim();
  std::vector<float> tile(kTile * dim);
  for (; begin < end; begin += kTile) {
    const int64_t size = std::min(kTile, end - begin);
    PieceRead part = read;
    part.rows = {read.rows.data() + begin, size};
    if (read.row_type == RowType::kFloat32) {
      GatherRows(part.table, part.rows, SerialFor, tile.data());
    } else {
      ExpandRows(part, kernels, 0, size, tile.data());
    }
    ToBfloat16({tile.data(), size * dim}, SerialFor, out + begin * dim);
  }
}

}  // namespace

int64_t NumValues(const std::vector<PieceRead>& reads) {
  int64_t count = 0;
  for (const PieceRead& read : reads) count += read.num_values();
  return count;
}

void FetchRows(const std::vector<PieceRead>& reads, const RowKernels& kernels,
               const ParallelFor& parallel_for, float* out) {
  for (const PieceRead& read : reads) {
    if (read.row_type == RowType::kFloat32) {
      GatherRows(read.table, read.rows, parallel_for, out);
    } else {
      parallel_for(read.rows.size(), 10 + read.dim() / 8,
                   [&](int64_t begin, int64_t end) {
                     ExpandRows(read, kernels, begin, end, out);
                   });
    }
    out += read.num_values();
  }
}

void FetchRows(const std::vector<PieceRead>& reads, const RowKernels& kernels,
               const ParallelFor& parallel_for, uint16_t* out) {
  for (const PieceRead& read : reads) {
    if (read.row_type == RowType::kBfloat16) {
      GatherRows(read.half_table, read.rows, parallel_for, out);
    } else {
      parallel_for(read.rows.size(), 10 + read.dim() / 4,
                   [&](int64_t begin, int64_t end) {
                     NarrowRows(read, kernels, begin, end, out);
                   });
    }
    out += read.num_values();
  }
}

Status ReadUpdates(const std::vector<Piece>& pieces,
                   const ApplyMessage& message, Span<const float> values,
                   std::vector<PieceUpdate>* updates) {
  const float* next = values.data();
  updates->assign(pieces.size(), {});
  for (size_t p = 0; p < pieces.size(); ++p) {
    PieceUpdate& update = (*updates)[p];
    update.rows = message.rows[p];
    update.hyperparameters = message.hyperparameters[p];
    LM_RETURN_IF_ERROR(CheckHyperparameters(
        pieces[p].optimizer, pieces[p].table, update.hyperparameters));
    update.gradients = {next, update.rows.size() * pieces[p].dim};
    next += update.gradients.size();
  }
  assert(next == values.data() + values.size());
  return Status();
}

void ApplyUpdates(const std::vector<Piece>& pieces,
                  const std::vector<PieceUpdate>& updates,
                  uint64_t rounding_seed, const RowKernels& kernels,
                  const ParallelFor& parallel_for) {
  std::vector<Grouped> grouped(pieces.size());
  std::vector<HalfTable> half_tables(pieces.size());
  std::vector<TableUpdate> tables;
  for (size_t p = 0; p < pieces.size(); ++p) {
    const Piece& piece = pieces[p];
    if (piece.optimizer == Optimizer::kNone) continue;
    grouped[p] = Group(updates[p], piece.dim);
    TableUpdate& table = tables.emplace_back();
    table.optimizer = piece.optimizer;
    table.hyperparameters = updates[p].hyperparameters;
    table.gradients.rows = grouped[p].rows;
    table.gradients.splits = grouped[p].splits;
    table.gradients.gradient_of = grouped[p].gradient_of;
    table.gradients.gradient_rows = grouped[p].gradient_rows;
    table.slots = updates[p].slots;
    if (piece.row_type == RowType::kFloat32) {
      table.table = &updates[p].table;
      continue;
    }
    half_tables[p].rows = updates[p].half_table;
    half_tables[p].type = piece.row_type;
    half_tables[p].first_row = piece.first_row;
    half_tables[p].noise_key =
        NoiseKey(rounding_seed, piece.table_number, updates[p].num_updates);
    table.half_table = &half_tables[p];
  }
  ApplyGradientsToAll(tables, kernels, parallel_for);
}

}  // namespace layoutmap
