#include "cc/core/engine/key_batches.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/engine/row_steps.h"
#include "cc/core/engine/token_steps.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/ids/row_groups.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"

namespace layoutmap {
namespace {

Status CheckKeys(const FeatureSpec& spec, Span<const int64_t> keys) {
  // The loop has no branches, so its speed is limited only by memory bandwidth.
  bool has_bad = false;
  for (const int64_t key : keys) has_bad |= key == kEmptyKey;
  if (!has_bad) return Status();
  const auto bad = std::find(keys.begin(), keys.end(), kEmptyKey);
  return InvalidArgument("Feature '" + spec.feature + "': a key must not be " +
                         std::to_string(kEmptyKey) +
                         ", which marks rows without a key. Received: this "
                         "value at index " +
                         std::to_string(bad - keys.begin()) + " (table '" +
                         spec.table + "')");
}

// Checks the batch of a feature and sets `keys` to the keys that it uses.
Status MakeOfKeys(const FeatureSpec& spec, const FeatureInput<int64_t>& input,
                  RaggedIds* ids, TableKeys* keys) {
  LM_RETURN_IF_ERROR(CheckKeys(spec, input.ids));
  LM_RETURN_IF_ERROR(RaggedIds::MakeOfKeys(spec, input, ids));
  keys->keys = input.ids;
  if (spec.max_sequence_length == 0) return Status();
  keys->joined.reserve(ids->rows().size());
  for (const uint32_t place : ids->rows()) {
    keys->joined.push_back(input.ids[place]);
  }
  keys->keys = keys->joined;
  return Status();
}

}  // namespace

Status KeyBatches::Make(
    const EngineConfig& config, const std::vector<bool>& is_open,
    const std::vector<std::vector<FeatureInput<int64_t>>>& inputs,
    KeyBatches* made) {
  KeyBatches batches;
  batches.config_ = &config;
  batches.keys_.resize(inputs.size());
  for (size_t r = 0; r < inputs.size(); ++r) {
    if (inputs[r].size() != config.features.size()) {
      return InvalidArgument(
          "A batch must have " + std::to_string(config.features.size()) +
          " features. Received: " + std::to_string(inputs[r].size()));
    }
    auto batch = std::make_shared<Batch>(inputs[r].size());
    batches.keys_[r].resize(inputs[r].size());
    for (size_t f = 0; f < inputs[r].size(); ++f) {
      const FeatureSpec& spec = config.features[f];
      LM_RETURN_IF_ERROR(
          is_open[config.table_of_feature[f]]
              ? MakeOfKeys(spec, inputs[r][f], &(*batch)[f],
                           &batches.keys_[r][f])
              : RaggedIds::Make(spec, inputs[r][f], &(*batch)[f]));
    }
    batches.batches_.push_back(std::move(batch));
  }
  *made = std::move(batches);
  return Status();
}

template <typename Visit>
void KeyBatches::ForFeaturesOf(int32_t table, const Visit& visit) const {
  for (size_t f = 0; f < config_->features.size(); ++f) {
    if (config_->table_of_feature[f] != table) continue;
    for (size_t r = 0; r < keys_.size(); ++r) visit(r, f);
  }
}

TableKeys KeyBatches::KeysOf(int32_t table) const {
  TableKeys found;
  bool is_first = true;
  ForFeaturesOf(table, [&](size_t r, size_t f) {
    const Span<const int64_t> keys = keys_[r][f].keys;
    if (keys.empty()) return;
    if (is_first) {
      found.keys = keys;
      is_first = false;
      return;
    }
    if (found.joined.empty()) {
      found.joined.assign(found.keys.begin(), found.keys.end());
    }
    found.joined.insert(found.joined.end(), keys.begin(), keys.end());
  });
  if (!found.joined.empty()) found.keys = found.joined;
  return found;
}

void KeyBatches::TakeRows(int32_t table, Span<const int64_t> rows,
                          int64_t unknown_row, int32_t step,
                          std::shared_ptr<RowGroups> groups) {
  if (groups != nullptr) {
    ForFeaturesOf(table, [&](size_t, size_t) { ++groups->num_batches; });
    if (groups->num_positions() == rows.size()) {
      // All keys have a row, so the groups are complete.
    } else if (unknown_row >= 0) {
      groups->Add(rows, static_cast<uint32_t>(unknown_row));
    } else {
      groups->Renumber(rows);
    }
  }
  int64_t first = 0;
  ForFeaturesOf(table, [&](size_t r, size_t f) {
    const int64_t size = keys_[r][f].keys.size();
    (*batches_[r])[f].TakeRowsOfKeys({rows.data() + first, size}, unknown_row,
                                     step, groups);
    first += size;
  });
}

std::vector<std::shared_ptr<const Batch>> KeyBatches::Finish() {
  return {batches_.begin(), batches_.end()};
}

RowsInFlight FindRowsInFlight(const HostEngine& engine,
                              const TokenSteps& tokens,
                              const RowSteps& row_steps, int32_t table) {
  RowsInFlight found;
  const EngineConfig& config = engine.config();
  const auto visit = [&](const Batch& batch) {
    for (size_t f = 0; f < batch.size(); ++f) {
      if (config.table_of_feature[f] != table) continue;
      if (batch[f].vocabulary_step() > 0) {
        found.oldest_step =
            std::min(found.oldest_step, batch[f].vocabulary_step());
      } else {
        found.pinned_rows.insert(found.pinned_rows.end(),
                                 batch[f].rows().begin(),
                                 batch[f].rows().end());
      }
    }
  };
  engine.VisitInFlight(visit);
  tokens.VisitInFlight(visit);
  row_steps.VisitInFlight(visit);
  std::vector<int64_t>& rows = found.pinned_rows;
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  return found;
}

}  // namespace layoutmap
