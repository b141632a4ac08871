#include "cc/core/steps/step.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/ids/row_groups.h"
#include "cc/core/rows/unique_rows.h"
#include "cc/core/steps/engine_config.h"

namespace layoutmap {
namespace {

// Visits each feature of a table and each replica, in the order in which
// gradients are summed.
template <typename Visit>
void ForSegments(const EngineConfig& config, int32_t table, size_t num_replicas,
                 const Visit& visit) {
  for (size_t f = 0; f < config.features.size(); ++f) {
    if (config.table_of_feature[f] != table) continue;
    for (size_t replica = 0; replica < num_replicas; ++replica) {
      visit(f, replica);
    }
  }
}

// Returns whether each output row has exactly one id. In this case, the index
// of an id equals the index of its output row.
bool HasOneEach(const RaggedIds& ids) {
  const Span<const int64_t> splits = ids.splits();
  if (ids.rows().size() != ids.num_outputs()) return false;
  bool one_each = true;
  for (int64_t o = 0; o < splits.size(); ++o) one_each &= splits[o] == o;
  return one_each;
}

// Returns the output row of each position. The result is empty if each position
// has a separate output row.
std::vector<uint32_t> OutputRows(const std::vector<const RaggedIds*>& segments,
                                 size_t num_positions) {
  std::vector<uint32_t> output_of;
  bool one_each = true;
  for (const RaggedIds* ids : segments) one_each &= HasOneEach(*ids);
  if (one_each) return output_of;
  output_of.resize(num_positions);
  uint32_t* next = output_of.data();
  uint32_t output = 0;
  for (const RaggedIds* ids : segments) {
    const Span<const int64_t> splits = ids->splits();
    for (int64_t o = 0; o < ids->num_outputs(); ++o, ++output) {
      next = std::fill_n(next, splits[o + 1] - splits[o], output);
    }
  }
  return output_of;
}

// Returns the gain of each position. The result is empty if all gains are 1.
std::vector<float> Gains(const std::vector<const RaggedIds*>& segments,
                         size_t num_positions) {
  bool all_one = true;
  for (const RaggedIds* ids : segments) all_one &= ids->gains().empty();
  std::vector<float> gains;
  if (all_one) return gains;
  gains.reserve(num_positions);
  for (const RaggedIds* ids : segments) {
    if (ids->gains().empty()) {
      gains.insert(gains.end(), ids->rows().size(), 1.0f);
    } else {
      gains.insert(gains.end(), ids->gains().begin(), ids->gains().end());
    }
  }
  return gains;
}

template <typename T>
std::vector<T> Permute(const std::vector<T>& values,
                       const std::vector<uint32_t>& positions) {
  std::vector<T> permuted(values.empty() ? 0 : positions.size());
  for (size_t k = 0; k < permuted.size(); ++k) {
    permuted[k] = values[positions[k]];
  }
  return permuted;
}

// Returns the unique rows if a vocabulary has found them for exactly these
// batches. Otherwise, returns null.
const RowGroups* GroupsOf(const std::vector<const RaggedIds*>& segments) {
  if (segments.empty()) return nullptr;
  const RowGroups* groups = segments[0]->groups().get();
  if (groups == nullptr || groups->num_batches != segments.size()) {
    return nullptr;
  }
  for (const RaggedIds* ids : segments) {
    if (ids->groups().get() != groups) return nullptr;
  }
  return groups;
}

// Computes the result of `PrepareTable` from the unique rows that a vocabulary
// has found.
TableStep StepOfGroups(const RowGroups& groups,
                       const std::vector<uint32_t>& output_of,
                       const std::vector<float>& gains,
                       const ParallelFor& parallel_for) {
  const int64_t num_parts = static_cast<int64_t>(groups.parts.size());
  // For each part, the number of rows and the number of positions in the
  // preceding parts.
  std::vector<int64_t> first_row(num_parts), first_position(num_parts);
  int64_t num_rows = 0, num_positions = 0;
  for (int64_t p = 0; p < num_parts; ++p) {
    first_row[p] = num_rows;
    first_position[p] = num_positions;
    num_rows += groups.parts[p].num_rows;
    num_positions += groups.parts[p].num_positions;
  }
  TableStep step;
  step.rows.resize(num_rows);
  step.splits.resize(num_rows + 1);
  step.gradient_of.resize(num_positions);
  step.gains.resize(gains.empty() ? 0 : num_positions);
  const uint32_t* number_of =
      groups.number_of.empty() ? nullptr : groups.number_of.data();
  const auto write_part = [&](int64_t p) {
    const RowGroups::Part& part = groups.parts[p];
    const uint32_t* const rows = groups.rows.data() + part.first;
    const uint32_t* const starts = groups.starts.data() + part.first;
    const uint32_t* const positions = groups.positions.data() + part.first;
    std::copy_n(rows, part.num_rows, step.rows.data() + first_row[p]);
    int64_t* const splits = step.splits.data() + first_row[p];
    for (int64_t u = 0; u < part.num_rows; ++u) {
      splits[u] = first_position[p] + starts[u];
    }
    for (int64_t k = 0; k < part.num_positions; ++k) {
      const uint32_t position =
          number_of == nullptr ? positions[k] : number_of[positions[k]];
      step.gradient_of[first_position[p] + k] =
          output_of.empty() ? position : output_of[position];
      if (!gains.empty()) step.gains[first_position[p] + k] = gains[position];
    }
  };
  const int64_t cost = 1 + 3 * num_positions / std::max<int64_t>(num_parts, 1);
  parallel_for(num_parts, cost, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) write_part(p);
  });
  step.splits[num_rows] = num_positions;
  return step;
}

// Returns the shape of `num_values` values of a feature as a string. The shape
// is "[num_samples, dim]", or "[num_samples, length, dim]" for a sequence. If
// the values are not complete samples, returns a string such as "41 values".
std::string ShapeOfSamples(const FeatureSpec& feature, int64_t dim,
                           int64_t num_values) {
  const int64_t length = feature.max_sequence_length;
  const int64_t size = dim * std::max<int64_t>(length, 1);
  if (size == 0 || num_values % size != 0) {
    return std::to_string(num_values) + " values";
  }
  return "[" + std::to_string(num_values / size) + ", " +
         (length > 0 ? std::to_string(length) + ", " : "") +
         std::to_string(dim) + "]";
}

}  // namespace

void BatchesInUse::Add(const std::shared_ptr<const Batch>& batch) {
  batches_.erase(std::remove_if(batches_.begin(), batches_.end(),
                                [](const auto& one) { return one.expired(); }),
                 batches_.end());
  batches_.push_back(batch);
}

void BatchesInUse::Visit(const std::function<void(const Batch&)>& visit) const {
  for (const std::weak_ptr<const Batch>& one : batches_) {
    if (const std::shared_ptr<const Batch> batch = one.lock()) visit(*batch);
  }
}

TableStep PrepareTable(const EngineConfig& config, int32_t table,
                       const std::vector<std::shared_ptr<const Batch>>& batches,
                       std::vector<uint32_t>* positions,
                       const ParallelFor& parallel_for) {
  std::vector<const RaggedIds*> segments;
  std::vector<Span<const uint32_t>> rows;
  ForSegments(config, table, batches.size(), [&](size_t f, size_t replica) {
    segments.push_back(&(*batches[replica])[f]);
    rows.push_back(segments.back()->rows());
  });
  const RowGroups* groups = positions == nullptr ? GroupsOf(segments) : nullptr;
  if (groups != nullptr) {
    const size_t size = groups->num_positions();
    return StepOfGroups(*groups, OutputRows(segments, size),
                        Gains(segments, size), parallel_for);
  }
  int64_t num_positions = 0;
  for (Span<const uint32_t> segment : rows) num_positions += segment.size();
  const std::vector<uint32_t> output_of = OutputRows(segments, num_positions);
  const std::vector<float> gains = Gains(segments, num_positions);
  // If the positions are not needed, the sort stores the output rows instead of
  // the positions.
  const bool by_position = positions != nullptr || !gains.empty();
  UniqueRows unique = FindUniqueRows(
      rows, config.tables[table].partition.num_rows(), parallel_for,
      by_position ? Span<const uint32_t>() : Span<const uint32_t>(output_of));

  TableStep step;
  step.rows = std::move(unique.rows);
  step.splits = std::move(unique.splits);
  step.gains = Permute(gains, unique.positions);
  if (by_position && !output_of.empty()) {
    step.gradient_of = Permute(output_of, unique.positions);
  } else if (positions != nullptr) {
    step.gradient_of = unique.positions;
  } else {
    step.gradient_of = std::move(unique.positions);
  }
  if (positions != nullptr) *positions = std::move(unique.positions);
  return step;
}

void PrepareTables(const EngineConfig& config,
                   const std::vector<std::shared_ptr<const Batch>>& batches,
                   const ParallelFor& parallel_for,
                   std::vector<TableStep>* tables) {
  const size_t num_tables = config.tables.size();
  tables->clear();
  tables->resize(num_tables);
  std::vector<int64_t> num_ids(num_tables);
  for (const std::shared_ptr<const Batch>& batch : batches) {
    for (size_t f = 0; f < batch->size(); ++f) {
      num_ids[config.table_of_feature[f]] += (*batch)[f].rows().size();
    }
  }
  // All threads share the sort for a large table. Small tables are sorted in
  // parallel, with one thread per table.
  std::vector<int32_t> small;
  int64_t cost = 0;
  for (size_t t = 0; t < num_tables; ++t) {
    const auto table = static_cast<int32_t>(t);
    if (num_ids[t] < kManyIds && num_tables > 1) {
      small.push_back(table);
      cost += 1000 + 10 * num_ids[t];
    } else {
      (*tables)[t] =
          PrepareTable(config, table, batches, nullptr, parallel_for);
    }
  }
  if (small.empty()) return;
  const auto num_small = static_cast<int64_t>(small.size());
  parallel_for(num_small, cost / num_small, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      (*tables)[small[i]] = PrepareTable(config, small[i], batches);
    }
  });
}

Status CheckGradients(const EngineConfig& config, const Batch& batch,
                      const BatchGradients& gradients) {
  if (gradients.features.size() != batch.size()) {
    return InvalidArgument(
        "There must be one gradient for each of " +
        std::to_string(batch.size()) +
        " features. Received: " + std::to_string(gradients.features.size()));
  }
  for (size_t f = 0; f < batch.size(); ++f) {
    const int64_t dim = config.dim_of_feature(f);
    const int64_t expected = batch[f].num_outputs() * dim;
    const int64_t received = gradients.features[f].size();
    if (received != expected) {
      return InvalidArgument(
          "Feature '" + config.features[f].feature +
          "': its gradient must be shaped like its activation, " +
          ShapeOfSamples(config.features[f], dim, expected) +
          ". Received: " + ShapeOfSamples(config.features[f], dim, received));
    }
  }
  return Status();
}

std::vector<const float*> GradientRows(
    const EngineConfig& config, int32_t table,
    const std::vector<BatchGradients>& gradients) {
  std::vector<const float*> rows;
  const int64_t dim = config.tables[table].dim;
  int64_t num_values = 0;
  ForSegments(config, table, gradients.size(), [&](size_t f, size_t replica) {
    num_values += gradients[replica].features[f].size();
  });
  rows.reserve(num_values / dim);
  ForSegments(config, table, gradients.size(), [&](size_t f, size_t replica) {
    const Span<const float> gradient = gradients[replica].features[f];
    for (int64_t i = 0; i < gradient.size(); i += dim) {
      rows.push_back(gradient.data() + i);
    }
  });
  return rows;
}

}  // namespace layoutmap
