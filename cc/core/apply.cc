#include "cc/core/apply.h"

#include <algorithm>

namespace layoutmap {
namespace {

constexpr int64_t kTile = 256;

// Pointers of rows [begin, end) and of the `kAhead` after them, as far as
// there are any; the rest repeats the last one.
void ResolveRows(const ShardedView<float>& view, Span<const uint32_t> rows,
                 int64_t begin, int64_t end, std::vector<float*>* row_of) {
  row_of->resize(end - begin + kAhead);
  const int64_t known = std::min(end - begin + kAhead, rows.size() - begin);
  for (int64_t i = 0; i < known; ++i) {
    (*row_of)[i] = view.row(rows[begin + i]);
  }
  std::fill(row_of->begin() + known, row_of->end(), (*row_of)[known - 1]);
}

void ApplyToRows(Optimizer optimizer, Span<const float> hyperparameters,
                 const RowGradients& gradients, const ShardedView<float>& table,
                 Span<const ShardedView<float>> slots,
                 const RowKernels& kernels, const ParallelFor& parallel_for) {
  Modifiers modifiers;
  const bool has_modifiers = HasModifiers(optimizer, hyperparameters);
  if (has_modifiers) modifiers = ReadModifiers(optimizer, hyperparameters);
  auto work = [&](int64_t begin, int64_t end) {
    std::vector<float*> row_of, slot_of[kMaxSlots];
    for (int64_t tile = begin; tile < end; tile += kTile) {
      ApplyArgs args;
      args.optimizer = optimizer;
      args.hyperparameters = hyperparameters.data();
      args.modifiers = has_modifiers ? &modifiers : nullptr;
      args.splits = gradients.splits.data();
      args.gradient_of = gradients.gradient_of.data();
      args.gains = gradients.gains.empty() ? nullptr : gradients.gains.data();
      args.gradient_rows = gradients.gradient_rows.data();
      args.begin = tile;
      args.end = std::min(tile + kTile, end);
      args.dim = table.dim;
      ResolveRows(table, gradients.rows, args.begin, args.end, &row_of);
      args.row_of = row_of.data();
      for (int64_t j = 0; j < slots.size(); ++j) {
        ResolveRows(slots[j], gradients.rows, args.begin, args.end,
                    &slot_of[j]);
        args.slot_of[j] = slot_of[j].data();
      }
      kernels.apply(args);
    }
  };
  // A gradient row mostly comes from cache, a table row and its slots from
  // memory and back: counted as four gradient rows per table row touched.
  const int64_t rows_touched = 1 + slots.size();
  ForItems(gradients.splits, 4 * rows_touched, 8 + table.dim / 8, parallel_for,
           work);
}

// The same gradients over every row of the table: none where there were none.
struct AllRows {
  std::vector<uint32_t> rows;
  std::vector<int64_t> splits;
};

AllRows SpreadOverAllRows(const RowGradients& gradients, int64_t num_rows) {
  AllRows all;
  all.rows.resize(num_rows);
  all.splits.resize(num_rows + 1);
  int64_t u = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    all.rows[row] = static_cast<uint32_t>(row);
    u += u < gradients.rows.size() && gradients.rows[u] == row;
    all.splits[row + 1] = gradients.splits[u];
  }
  return all;
}

}  // namespace

void ApplyGradients(Optimizer optimizer, Span<const float> hyperparameters,
                    const RowGradients& gradients,
                    const ShardedView<float>& table,
                    Span<const ShardedView<float>> slots,
                    const RowKernels& kernels,
                    const ParallelFor& parallel_for) {
  assert(slots.size() == NumSlots(optimizer));
  if (!TouchesAllRows(optimizer, hyperparameters)) {
    return ApplyToRows(optimizer, hyperparameters, gradients, table, slots,
                       kernels, parallel_for);
  }
  const AllRows all = SpreadOverAllRows(gradients, table.partition->num_rows());
  RowGradients spread = gradients;
  spread.rows = all.rows;
  spread.splits = all.splits;
  ApplyToRows(optimizer, hyperparameters, spread, table, slots, kernels,
              parallel_for);
}

}  // namespace layoutmap
