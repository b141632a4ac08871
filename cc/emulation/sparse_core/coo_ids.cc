#include "cc/emulation/sparse_core/coo_ids.h"

#include <cassert>
#include <cmath>
#include <string>

namespace layoutmap {
namespace {

constexpr char kUnsorted[] =
    "Invalid indices_or_row_splits input, indices of SparseTensor need to be "
    "sorted in ascending (non-decreasing) order.";

Status RowsOfSparse(const CooInput& input, int64_t sample_count,
                    std::vector<int32_t>* rows) {
  if (input.num_columns != 2) {
    return InvalidArgument(
        "Invalid indices_or_row_splits input for SparseTensor, the second "
        "dimension of the indices of SparseTensor should be 2. But got " +
        std::to_string(input.num_columns) + ".");
  }
  const int64_t num_ids = input.ids.size();
  if (input.locations.size() != 2 * num_ids) {
    return InvalidArgument(
        "The indices of a SparseTensor must have one row "
        "per id. Received: " +
        std::to_string(input.locations.size() / 2) + " rows and " +
        std::to_string(num_ids) + " ids.");
  }
  int32_t previous = 0;
  for (int64_t i = 0; i < num_ids; ++i) {
    const int32_t row = input.locations[2 * i];
    if (row < previous) return InvalidArgument(kUnsorted);
    if (row >= sample_count) {
      return InvalidArgument(
          "Invalid indices_or_row_splits input, indices of SparseTensor "
          "contained a row_id " +
          std::to_string(row) + " that was >= the sample count (" +
          std::to_string(sample_count) + ").");
    }
    rows->push_back(row);
    previous = row;
  }
  return {};
}

Status RowsOfRagged(const CooInput& input, int64_t sample_count,
                    std::vector<int32_t>* rows) {
  const Span<const int32_t> splits = input.locations;
  if (splits.size() != sample_count + 1) {
    return InvalidArgument(
        "Ragged tensor input should have row_splits elements number the same "
        "as the sample count + 1. But got " +
        std::to_string(splits.size()) +
        " elements for row_splits and sample count as " +
        std::to_string(sample_count) + ".");
  }
  bool is_valid = splits[0] == 0 && splits[sample_count] == input.ids.size();
  for (int64_t s = 0; s < sample_count; ++s) {
    is_valid = is_valid && splits[s] <= splits[s + 1];
  }
  if (!is_valid) {
    return InvalidArgument(
        "The row_splits of a ragged tensor must ascend from 0 to the number "
        "of ids, " +
        std::to_string(input.ids.size()) + ".");
  }
  for (int64_t s = 0; s < sample_count; ++s) {
    rows->insert(rows->end(), splits[s + 1] - splits[s],
                 static_cast<int32_t>(s));
  }
  return {};
}

Status RowsOfDense(const CooInput& input, int64_t sample_count,
                   std::vector<int32_t>* rows) {
  const int64_t num_ids = input.ids.size();
  if (num_ids != 0 && num_ids != sample_count) {
    return InvalidArgument(
        "Dense tensor input should have values elements number the same as "
        "the sample count. But got " +
        std::to_string(num_ids) + " elements for values and sample count as " +
        std::to_string(sample_count) + ".");
  }
  for (int64_t i = 0; i < num_ids; ++i) {
    rows->push_back(static_cast<int32_t>(i));
  }
  return {};
}

Status RowsOf(const CooInput& input, int64_t sample_count,
              std::vector<int32_t>* rows) {
  rows->reserve(input.ids.size());
  if (input.is_sparse) return RowsOfSparse(input, sample_count, rows);
  if (input.locations.empty()) return RowsOfDense(input, sample_count, rows);
  return RowsOfRagged(input, sample_count, rows);
}

float Contribution(Combiner combiner, float weight) {
  return combiner == Combiner::kMean ? weight : weight * weight;
}

float Scale(Combiner combiner, float sum) {
  if (sum == 0.0f) return 0.0f;
  const float divisor = combiner == Combiner::kMean ? sum : std::sqrt(sum);
  return static_cast<float>(1.0 / divisor);
}

}  // namespace

Status CheckCooSettings(const CooSettings& settings) {
  if ((settings.num_shards & (settings.num_shards - 1)) != 0) {
    return InvalidArgument("num_sc_shards " +
                           std::to_string(settings.num_shards) +
                           " is not a power of two.");
  }
  // On a TPU, the kernel of TensorFlow writes behind the end of a vector.
  if (settings.sample_count % settings.num_cores != 0) {
    return InvalidArgument(
        "sample_count " + std::to_string(settings.sample_count) +
        " is not divisible by the number of sparsecores per chip " +
        std::to_string(settings.num_cores));
  }
  return {};
}

Status ConvertToCoo(const CooSettings& settings, const CooInput& input,
                    std::vector<CooIds>* cores) {
  const int64_t num_ids = input.ids.size();
  assert(input.weights.size() == 1 || input.weights.size() == num_ids);
  std::vector<int32_t> samples;
  LM_RETURN_IF_ERROR(RowsOf(input, settings.sample_count, &samples));
  const bool is_sum = settings.combiner == Combiner::kSum;
  std::vector<float> scales(is_sum ? 0 : settings.sample_count, 0.0f);
  const auto weight_of = [&](int64_t i) {
    return input.weights[input.weights.size() == 1 ? 0 : i];
  };
  if (!is_sum) {
    for (int64_t i = 0; i < num_ids; ++i) {
      scales[samples[i]] += Contribution(settings.combiner, weight_of(i));
    }
    for (float& scale : scales) scale = Scale(settings.combiner, scale);
  }
  const int64_t samples_per_core = settings.sample_count / settings.num_cores;
  const auto mask = static_cast<uint32_t>(settings.num_shards - 1);
  const int64_t row_offset = settings.row_offset / settings.num_cores;
  const int64_t stacked = settings.stacked_sample_count / settings.num_cores;
  cores->assign(settings.num_cores, CooIds());
  for (int64_t i = 0; i < num_ids;) {
    const int32_t sample = samples[i];
    const int32_t id = input.ids[i];
    // On a TPU, a negative id reads memory in front of the table.
    if (id < 0) {
      return InvalidArgument(
          "Ids must not be negative. Received: " + std::to_string(id) +
          " (sample " + std::to_string(sample) + ").");
    }
    float gain = weight_of(i);
    for (++i; i < num_ids && samples[i] == sample && input.ids[i] == id; ++i) {
      gain += weight_of(i);
    }
    const int64_t core = sample / samples_per_core;
    CooIds& ids = (*cores)[core];
    ids.rows.push_back(static_cast<int32_t>(sample % samples_per_core +
                                            row_offset + stacked * core));
    const auto row = static_cast<uint32_t>(id);
    const uint32_t rotated =
        ((row + static_cast<uint32_t>(settings.col_shift)) & mask) +
        (row & ~mask) + static_cast<uint32_t>(settings.col_offset);
    ids.cols.push_back(static_cast<int32_t>(rotated));
    ids.gains.push_back(is_sum ? gain : gain * scales[sample]);
  }
  return {};
}

}  // namespace layoutmap
