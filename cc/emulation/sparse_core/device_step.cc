#include "cc/emulation/sparse_core/device_step.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <numeric>

#include "cc/core/base/row_ids.h"
#include "cc/core/optimizers/apply.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/tables/lookup.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/emulation/sparse_core/id_buffers.h"

namespace layoutmap {
namespace {

int64_t RoundUp(int64_t value) {
  return (value + kSparseCoreAlignment - 1) / kSparseCoreAlignment *
         kSparseCoreAlignment;
}

// The ids that one SparseCore sends to one SparseCore, and their places.
struct Part {
  int64_t chip;
  int64_t core;
  int64_t shard;
  int64_t begin;
  int64_t end;
};

std::string Describe(const DeviceSettings& settings, const Part& part) {
  return " (chip " + std::to_string(part.chip) + ", SparseCore " +
         std::to_string(part.core) + ", table " + settings.table + ")";
}

Status ReadPart(const DeviceSettings& settings, const ChipIds& chip,
                const Part& part, DeviceIds* ids) {
  const int64_t rows_per_core =
      settings.rows_per_chip / settings.cores_per_chip;
  const int64_t samples_per_core =
      settings.samples_per_chip / settings.cores_per_chip;
  const int64_t owner = part.shard / settings.cores_per_chip;
  const int64_t first_row =
      owner * settings.rows_per_chip +
      part.shard % settings.cores_per_chip * rows_per_core;
  const int64_t first_sample =
      part.chip * settings.samples_per_chip + part.core * samples_per_core;
  int64_t num_unique = 0;
  for (int64_t i = part.begin; i < part.end; ++i) {
    const int32_t row = chip.cols[i];
    const int32_t sample = chip.rows[i];
    // On a TPU, such an id reads or writes other memory.
    if (row < 0 || row >= rows_per_core) {
      return InvalidArgument(
          "Ids must be rows of the stacked table. Received: row " +
          std::to_string(row) + " of " + std::to_string(rows_per_core) +
          " rows per SparseCore" + Describe(settings, part));
    }
    if (sample < 0 || sample >= samples_per_core) {
      return InvalidArgument("Received: sample " + std::to_string(sample) +
                             " of " + std::to_string(samples_per_core) +
                             " samples per SparseCore" +
                             Describe(settings, part));
    }
    num_unique += i == part.begin || row != chip.cols[i - 1];
    ids->rows.push_back(static_cast<uint32_t>(first_row + row));
    ids->samples.push_back(static_cast<uint32_t>(first_sample + sample));
    ids->gains.push_back(chip.gains[i]);
  }
  if (part.end - part.begin > settings.max_ids ||
      num_unique > settings.max_unique_ids) {
    return InvalidArgument(
        "Sparse core " + std::to_string(part.shard) + " gets " +
        std::to_string(part.end - part.begin) + " ids and " +
        std::to_string(num_unique) +
        " unique ids while the max ids per sparse core is set to be " +
        std::to_string(settings.max_ids) +
        " and the max unique ids per sparse core is set to be " +
        std::to_string(settings.max_unique_ids) + Describe(settings, part));
  }
  return {};
}

Status ReadChip(const DeviceSettings& settings, const ChipIds& chip,
                int64_t chip_index, DeviceIds* ids) {
  const int64_t num_shards = settings.num_chips * settings.cores_per_chip;
  const int64_t size = chip.rows.size();
  if (chip.cols.size() != size || chip.gains.size() != size) {
    return InvalidArgument(
        "The sorted ids and gains must have the same size (table " +
        settings.table + ").");
  }
  const int64_t num_parts = settings.cores_per_chip * RoundUp(num_shards);
  if (chip.num_minibatches < 1 ||
      chip.num_minibatches > chip.row_pointers.size() / num_parts) {
    return InvalidArgument(
        "The row pointers must have " + std::to_string(num_parts) +
        " elements per minibatch. Received: " +
        std::to_string(chip.row_pointers.size()) + " elements for " +
        std::to_string(chip.num_minibatches) + " minibatches (table " +
        settings.table + ").");
  }
  int64_t pointer = 0;
  int64_t begin = 0;
  for (int64_t core = 0; core < settings.cores_per_chip; ++core) {
    for (int64_t batch = 0; batch < chip.num_minibatches; ++batch) {
      for (int64_t shard = 0; shard < num_shards; ++shard) {
        const int64_t end = chip.row_pointers[pointer++];
        if (end < begin || end > size) {
          return InvalidArgument(
              "Row pointers must ascend to at most " + std::to_string(size) +
              ". Received: " + std::to_string(end) + " after " +
              std::to_string(begin) + " (table " + settings.table + ").");
        }
        LM_RETURN_IF_ERROR(ReadPart(
            settings, chip, {chip_index, core, shard, begin, end}, ids));
        begin = RoundUp(end);
      }
      pointer = RoundUp(pointer);
    }
  }
  return {};
}

RowPartition ChipsOf(const DeviceSettings& settings) {
  std::vector<int64_t> offsets;
  for (int64_t chip = 0; chip <= settings.num_chips; ++chip) {
    offsets.push_back(chip * settings.rows_per_chip);
  }
  RowPartition partition;
  const Status made = RowPartition::Make(Placement::kDiv, offsets, &partition);
  assert(made.ok());
  (void)made;
  return partition;
}

// Returns the ids in the order of `keys`. Equal keys keep their order.
std::vector<uint32_t> SortedBy(const std::vector<uint32_t>& keys) {
  std::vector<uint32_t> order(keys.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return keys[a] < keys[b]; });
  return order;
}

}  // namespace

Status CheckDeviceSettings(const DeviceSettings& settings) {
  const int64_t num_shards = settings.num_chips * settings.cores_per_chip;
  if (settings.cores_per_chip < 1 || (num_shards & (num_shards - 1)) != 0) {
    return InvalidArgument(
        "num_sparsecores_per_device must be a power of two, but got: " +
        std::to_string(settings.cores_per_chip));
  }
  if (settings.samples_per_chip % settings.cores_per_chip != 0) {
    return InvalidArgument("num_samples_per_chip " +
                           std::to_string(settings.samples_per_chip) +
                           " not divisible by the number of sparsecores per "
                           "chip " +
                           std::to_string(settings.cores_per_chip));
  }
  if (settings.rows_per_chip % settings.cores_per_chip != 0) {
    return InvalidArgument(
        "The SparseCores of a chip must divide the rows of its table. "
        "Received: " +
        std::to_string(settings.rows_per_chip) + " rows for " +
        std::to_string(settings.cores_per_chip) + " SparseCores (table " +
        settings.table + ").");
  }
  constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();
  if (settings.rows_per_chip > kMost / settings.num_chips ||
      settings.samples_per_chip > kMost / settings.num_chips) {
    return InvalidArgument(
        "A stacked table must have less than 2^32 rows and samples (table " +
        settings.table + ").");
  }
  return {};
}

Status ReadDeviceIds(const DeviceSettings& settings,
                     const std::vector<ChipIds>& chips, DeviceIds* ids) {
  for (size_t chip = 0; chip < chips.size(); ++chip) {
    LM_RETURN_IF_ERROR(
        ReadChip(settings, chips[chip], static_cast<int64_t>(chip), ids));
  }
  return {};
}

void LookUpOnDevice(const DeviceSettings& settings, const DeviceIds& ids,
                    const std::vector<const float*>& tables,
                    const Quantization* quantization, const RowKernels& kernels,
                    const ParallelFor& parallel_for,
                    const std::vector<float*>& activations) {
  const RowPartition partition = ChipsOf(settings);
  const ShardedView<const float> table = {&partition, tables, settings.dim};
  const std::vector<uint32_t> order = SortedBy(ids.samples);
  std::vector<uint32_t> rows;
  std::vector<float> gains;
  for (const uint32_t i : order) {
    rows.push_back(ids.rows[i]);
    gains.push_back(ids.gains[i]);
  }
  size_t next = 0;
  for (int64_t chip = 0; chip < settings.num_chips; ++chip) {
    std::vector<int64_t> splits = {static_cast<int64_t>(next)};
    for (int64_t s = 0; s < settings.samples_per_chip; ++s) {
      const int64_t sample = chip * settings.samples_per_chip + s;
      while (next < order.size() && ids.samples[order[next]] == sample) ++next;
      splits.push_back(static_cast<int64_t>(next));
    }
    Lookup(table, rows, splits, gains, kernels, parallel_for,
           {activations[chip], settings.samples_per_chip, settings.dim},
           quantization);
  }
}

void UpdateOnDevice(const DeviceSettings& settings, const DeviceIds& ids,
                    const std::vector<const float*>& gradients,
                    Optimizer optimizer, Span<const float> hyperparameters,
                    const RowKernels& kernels, const ParallelFor& parallel_for,
                    const std::vector<float*>& tables,
                    const std::vector<std::vector<float*>>& slots) {
  const RowPartition partition = ChipsOf(settings);
  const ShardedView<float> table = {&partition, tables, settings.dim};
  std::vector<ShardedView<float>> slot_views;
  for (const std::vector<float*>& slot : slots) {
    slot_views.push_back({&partition, slot, settings.dim});
  }
  std::vector<const float*> gradient_rows;
  for (const float* chip : gradients) {
    for (int64_t s = 0; s < settings.samples_per_chip; ++s) {
      gradient_rows.push_back(chip + s * settings.dim);
    }
  }
  std::vector<uint32_t> unique;
  std::vector<int64_t> splits;
  std::vector<uint32_t> gradient_of;
  std::vector<float> gains;
  for (const uint32_t i : SortedBy(ids.rows)) {
    if (unique.empty() || unique.back() != ids.rows[i]) {
      unique.push_back(ids.rows[i]);
      splits.push_back(static_cast<int64_t>(gains.size()));
    }
    gradient_of.push_back(ids.samples[i]);
    gains.push_back(ids.gains[i]);
  }
  splits.push_back(static_cast<int64_t>(gains.size()));
  if (unique.empty()) return;
  RowGradients row_gradients;
  row_gradients.rows = unique;
  row_gradients.splits = splits;
  row_gradients.gradient_of = gradient_of;
  row_gradients.gains = gains;
  row_gradients.gradient_rows = gradient_rows;
  ApplyGradients(optimizer, hyperparameters, row_gradients, table, slot_views,
                 kernels, parallel_for);
}

}  // namespace layoutmap
