#include "cc/core/apply.h"

#include <algorithm>
#include <cmath>

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

}  // namespace

Status ParseOptimizer(const std::string& name, Optimizer* optimizer) {
  if (name == "none") {
    *optimizer = Optimizer::kNone;
  } else if (name == "sgd") {
    *optimizer = Optimizer::kSgd;
  } else if (name == "adagrad") {
    *optimizer = Optimizer::kAdagrad;
  } else {
    return InvalidArgument(
        "`optimizer` must be one of none, sgd, adagrad. Received: " + name);
  }
  return Status();
}

int NumSlots(Optimizer optimizer) {
  return optimizer == Optimizer::kAdagrad ? 1 : 0;
}

Status CheckHyperparameters(Optimizer optimizer, const std::string& table,
                            Span<const float> hyperparameters) {
  const int64_t expected = optimizer == Optimizer::kNone ? 0 : 1;
  if (hyperparameters.size() != expected) {
    return InvalidArgument("Table '" + table + "': its optimizer takes " +
                           std::to_string(expected) +
                           " hyperparameters. Received: " +
                           std::to_string(hyperparameters.size()));
  }
  if (expected > 0 &&
      !(std::isfinite(hyperparameters[0]) && hyperparameters[0] >= 0)) {
    return InvalidArgument(
        "Table '" + table +
        "': the learning rate must be finite and at least 0. Received: " +
        std::to_string(hyperparameters[0]));
  }
  return Status();
}

void ApplyGradients(Optimizer optimizer, Span<const float> hyperparameters,
                    const RowGradients& gradients,
                    const ShardedView<float>& table,
                    Span<const ShardedView<float>> slots,
                    const RowKernels& kernels,
                    const ParallelFor& parallel_for) {
  assert(slots.size() == NumSlots(optimizer));
  auto work = [&](int64_t begin, int64_t end) {
    std::vector<float*> row_of, slot_of[kMaxSlots];
    for (int64_t tile = begin; tile < end; tile += kTile) {
      ApplyArgs args;
      args.optimizer = optimizer;
      args.hyperparameters = hyperparameters.data();
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

}  // namespace layoutmap
