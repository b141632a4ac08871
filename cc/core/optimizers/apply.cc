#include "cc/core/optimizers/apply.h"

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "cc/core/base/item_loops.h"
#include "cc/core/base/parallel_for.h"
#include "cc/core/base/row_queue.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/views.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/simd/row_tuning.h"
#include "cc/core/tables/half_table.h"
#include "cc/core/tables/sharded_view.h"

namespace layoutmap {
namespace {

// Tile size for 16-bit rows, which are expanded to floats. The expansion of a
// tile prefetches the rows of the next tile. These rows arrive in the cache
// while the current tile is updated and rounded.
constexpr int64_t kHalfTile = kAhead;

// Computes the pointers to rows [begin, end) and to the `ahead` rows after
// them. If `rows` has fewer rows, the pointer to the last row is repeated.
template <typename T>
void ResolveRows(const ShardedView<T>& view, Span<const uint32_t> rows,
                 int64_t begin, int64_t end, int64_t ahead,
                 std::vector<T*>* row_of) {
  row_of->resize(end - begin + ahead);
  const int64_t known = std::min(end - begin + ahead, rows.size() - begin);
  view.WithRow([&](auto row) {
    for (int64_t i = 0; i < known; ++i) (*row_of)[i] = row(rows[begin + i]);
  });
  std::fill(row_of->begin() + known, row_of->end(), (*row_of)[known - 1]);
}

// A tile of float rows. The kernel updates the rows in place.
class FloatTile {
 public:
  static constexpr RowType kRowType = RowType::kFloat32;

  FloatTile(const ShardedView<float>& table, const RowTuning& tuning)
      : table_(table), tuning_(tuning) {}

  int64_t size() const { return tuning_.tile; }

  float* const* Open(Span<const uint32_t> rows, int64_t begin, int64_t end,
                     const RowKernels& kernels) {
    ResolveRows(table_, rows, begin, end, tuning_.ahead, &row_of_);
    return row_of_.data();
  }
  void Close(Span<const uint32_t> rows, int64_t begin, int64_t end,
             const RowKernels& kernels) {}

 private:
  const ShardedView<float>& table_;
  const RowTuning& tuning_;
  std::vector<float*> row_of_;
};

// A tile of 16-bit rows. The rows are expanded to floats before the update and
// rounded after the update.
class HalfTile {
 public:
  // The tuning is the same for bfloat16 and float16.
  static constexpr RowType kRowType = RowType::kBfloat16;

  HalfTile(const HalfTable& table, const RowTuning& tuning)
      : table_(table),
        rows_(kHalfTile * table.rows.dim),
        float_row_of_(kHalfTile + tuning.ahead, rows_.data()),
        noise_keys_(kHalfTile) {
    for (int64_t i = 0; i < kHalfTile; ++i) {
      float_row_of_[i] = rows_.data() + i * table.rows.dim;
    }
  }

  int64_t size() const { return kHalfTile; }

  float* const* Open(Span<const uint32_t> rows, int64_t begin, int64_t end,
                     const RowKernels& kernels) {
    ResolveRows(table_.rows, rows, begin, end, kAhead, &row_of_);
    ExpandArgs args;
    args.row_type = table_.type;
    args.row_of = row_of_.data();
    args.num_rows = end - begin;
    args.dim = table_.rows.dim;
    args.rows = rows_.data();
    kernels.expand(args);
    return float_row_of_.data();
  }

  void Close(Span<const uint32_t> rows, int64_t begin, int64_t end,
             const RowKernels& kernels) {
    for (int64_t u = begin; u < end; ++u) {
      noise_keys_[u - begin] =
          NoiseKeyOfRow(table_.noise_key, table_.first_row + rows[u]);
    }
    RoundArgs args;
    args.row_type = table_.type;
    args.rows = rows_.data();
    args.noise_keys = noise_keys_.data();
    args.num_rows = end - begin;
    args.dim = table_.rows.dim;
    args.row_of = row_of_.data();
    kernels.round(args);
  }

 private:
  const HalfTable& table_;
  std::vector<uint16_t*> row_of_;
  std::vector<float> rows_;
  std::vector<float*> float_row_of_;
  std::vector<uint64_t> noise_keys_;
};

// The settings that all ranges of an update share.
struct Settings {
  explicit Settings(const TableUpdate& update)
      : has_modifiers(HasModifiers(update.optimizer, update.hyperparameters)) {
    if (has_modifiers) {
      modifiers = ReadModifiers(update.optimizer, update.hyperparameters);
    }
  }

  bool has_modifiers;
  Modifiers modifiers = {};
};

// Prefetches rows [begin, end). A kernel only prefetches rows after its first
// rows, so all rows of a small range would otherwise be read from memory one
// after the other.
template <typename T>
void PrefetchRows(const ShardedView<T>& view, Span<const uint32_t> rows,
                  int64_t begin, int64_t end) {
  const int64_t row_bytes = view.dim * static_cast<int64_t>(sizeof(T));
  view.WithRow([&](auto row) {
    for (int64_t i = begin; i < end; ++i) PrefetchRow(row(rows[i]), row_bytes);
  });
}

const ShardedView<float>& RowsOf(const ShardedView<float>& table) {
  return table;
}
const ShardedView<uint16_t>& RowsOf(const HalfTable& table) {
  return table.rows;
}

template <typename Tile, typename Table>
void ApplyToRange(const TableUpdate& update, const Settings& settings,
                  const RowGradients& gradients, const Table& table,
                  int64_t dim, const RowKernels& kernels, int64_t begin,
                  int64_t end) {
  const RowTuning tuning = update.tuning.tile > 0
                               ? update.tuning
                               : UpdateTuning(Tile::kRowType, dim);
  const int64_t first_end = std::min(end, begin + kAhead);
  PrefetchRows(RowsOf(table), gradients.rows, begin, first_end);
  for (const ShardedView<float>& slot : update.slots) {
    PrefetchRows(slot, gradients.rows, begin, first_end);
  }
  Tile tile(table, tuning);
  std::vector<float*> slot_of[kMaxSlots];
  std::vector<float> scratch(dim);
  for (; begin < end; begin += tile.size()) {
    ApplyArgs args;
    args.optimizer = update.optimizer;
    args.hyperparameters = update.hyperparameters.data();
    args.modifiers = settings.has_modifiers ? &settings.modifiers : nullptr;
    args.splits = gradients.splits.data();
    args.gradient_of = gradients.gradient_of.data();
    args.gains = gradients.gains.empty() ? nullptr : gradients.gains.data();
    args.gradient_rows = gradients.gradient_rows.data();
    args.num_positions = gradients.gradient_of.size();
    args.begin = begin;
    args.end = std::min(begin + tile.size(), end);
    args.dim = dim;
    args.ahead = tuning.ahead;
    args.gradients_ahead = tuning.gradients_ahead;
    args.scratch = scratch.data();
    args.row_of = tile.Open(gradients.rows, args.begin, args.end, kernels);
    for (int64_t j = 0; j < update.slots.size(); ++j) {
      ResolveRows(update.slots[j], gradients.rows, args.begin, args.end,
                  tuning.ahead, &slot_of[j]);
      args.slot_of[j] = slot_of[j].data();
    }
    kernels.apply(args);
    tile.Close(gradients.rows, args.begin, args.end, kernels);
  }
}

// The gradients of every row of a table. Rows that are not in the update have
// no gradients.
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

int64_t DimOf(const TableUpdate& update) {
  return update.table != nullptr ? update.table->dim
                                 : update.half_table->rows.dim;
}

int64_t NumRowsOf(const TableUpdate& update) {
  return update.table != nullptr
             ? update.table->partition->num_rows()
             : update.half_table->rows.partition->num_rows();
}

// A prepared update, which can run on any range of its rows.
class PreparedUpdate {
 public:
  explicit PreparedUpdate(const TableUpdate& update)
      : update_(update), settings_(update), gradients_(update.gradients) {
    assert(update.slots.size() == NumSlots(update.optimizer));
    if (!TouchesAllRows(update.optimizer, update.hyperparameters)) return;
    all_ = SpreadOverAllRows(gradients_, NumRowsOf(update));
    gradients_.rows = all_.rows;
    gradients_.splits = all_.splits;
  }
  PreparedUpdate(const PreparedUpdate&) = delete;
  PreparedUpdate& operator=(const PreparedUpdate&) = delete;

  ItemLoop Loop() const {
    // The cost estimate assumes that gradient rows are in the cache. A table
    // row or a slot row is read from memory and written to memory, which costs
    // four times as much as a gradient row.
    const int64_t rows_touched = 1 + update_.slots.size();
    return {gradients_.splits, 4 * rows_touched, 8 + DimOf(update_) / 8};
  }

  void Run(const RowKernels& kernels, int64_t begin, int64_t end) const {
    if (update_.table != nullptr) {
      return ApplyToRange<FloatTile>(update_, settings_, gradients_,
                                     *update_.table, DimOf(update_), kernels,
                                     begin, end);
    }
    ApplyToRange<HalfTile>(update_, settings_, gradients_, *update_.half_table,
                           DimOf(update_), kernels, begin, end);
  }

 private:
  const TableUpdate& update_;
  const Settings settings_;
  RowGradients gradients_;
  AllRows all_;
};

}  // namespace

void ApplyGradientsToAll(const std::vector<TableUpdate>& updates,
                         const RowKernels& kernels,
                         const ParallelFor& parallel_for) {
  std::deque<PreparedUpdate> prepared;
  std::vector<ItemLoop> loops;
  for (const TableUpdate& update : updates) {
    prepared.emplace_back(update);
    loops.push_back(prepared.back().Loop());
  }
  RunItemLoops(loops, parallel_for, [&](size_t u, int64_t begin, int64_t end) {
    prepared[u].Run(kernels, begin, end);
  });
}

void ApplyGradients(Optimizer optimizer, Span<const float> hyperparameters,
                    const RowGradients& gradients,
                    const ShardedView<float>& table,
                    Span<const ShardedView<float>> slots,
                    const RowKernels& kernels,
                    const ParallelFor& parallel_for) {
  ApplyGradientsToAll(
      {{optimizer, hyperparameters, gradients, &table, nullptr, slots}},
      kernels, parallel_for);
}

void ApplyGradients(Optimizer optimizer, Span<const float> hyperparameters,
                    const RowGradients& gradients, const HalfTable& table,
                    Span<const ShardedView<float>> slots,
                    const RowKernels& kernels,
                    const ParallelFor& parallel_for) {
  ApplyGradientsToAll(
      {{optimizer, hyperparameters, gradients, nullptr, &table, slots}},
      kernels, parallel_for);
}

}  // namespace layoutmap
