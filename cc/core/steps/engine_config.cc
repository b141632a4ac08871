#include "cc/core/steps/engine_config.h"

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

#include "cc/core/base/status.h"

namespace layoutmap {
namespace {

using std::to_string;

// Maximum number of replicas, which is far above the number that any machine
// can run, but low enough that the state of all replicas fits in memory.
constexpr int32_t kMaxNumReplicas = 1 << 16;

}  // namespace

Status CheckConfig(const EngineConfig& config) {
  if (config.num_replicas < 1 || config.num_replicas > kMaxNumReplicas ||
      config.max_pending_steps < 1) {
    return InvalidArgument("`num_replicas` must be in [1, " +
                           to_string(kMaxNumReplicas) +
                           "] and `max_pending_steps` at least 1. Received: " +
                           to_string(config.num_replicas) + ", " +
                           to_string(config.max_pending_steps));
  }
  if (config.features.empty()) {
    return InvalidArgument("`feature_config` must hold at least one feature");
  }
  std::set<std::string> names;
  for (const TableSpec& table : config.tables) {
    if (!names.insert(table.name).second) {
      return InvalidArgument("Two tables have the name '" + table.name + "'");
    }
    if (table.dim < 1) {
      return InvalidArgument(
          "Table '" + table.name +
          "': dim must be at least 1. Received: " + to_string(table.dim));
    }
  }
  for (size_t f = 0; f < config.features.size(); ++f) {
    const int32_t table = config.table_of_feature[f];
    if (table < 0 || table >= static_cast<int32_t>(config.tables.size())) {
      return InvalidArgument("Feature '" + config.features[f].feature +
                             "': table " + to_string(table) +
                             " is not one of " +
                             to_string(config.tables.size()));
    }
    if (config.features[f].max_sequence_length < 0) {
      return InvalidArgument(
          "Feature '" + config.features[f].feature +
          "': max_sequence_length must be at least 0. Received: " +
          to_string(config.features[f].max_sequence_length));
    }
  }
  return Status();
}

}  // namespace layoutmap
