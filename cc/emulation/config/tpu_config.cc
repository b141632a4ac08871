#include "cc/emulation/config/tpu_config.h"

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/steps/engine_config.h"
#include "cc/emulation/config/optimization_parameters.h"
#include "cc/emulation/config/read_fields.h"
#include "cc/emulation/config/wire_reader.h"

namespace layoutmap {
namespace {

using std::to_string;

constexpr int64_t kMaxNumRows = int64_t{1} << 32;
// Several lists have one entry per host or per core. The limits exceed the size
// of every TPU pod. They prevent large allocations if the bytes are malformed.
constexpr int64_t kMaxNumHosts = 1 << 10;
constexpr int64_t kMaxNumCores = 1 << 14;
constexpr int64_t kMaxNumOutputs = INT32_MAX;
constexpr int64_t kMaxDim = 1 << 20;
// Maximum number of batches in the queue of a core. If the queue is full,
// `enqueue` waits. The queue size of a TPU is not public. This value is larger
// than the number of batches that programs enqueue in advance.
constexpr int64_t kMaxPendingSteps = 32;

// Field numbers from tpu_embedding_configuration.proto.
namespace field {
enum Configuration : uint32_t {
  kTableDescriptor = 1,
  kMode = 2,
  kNumHosts = 4,
  kNumTensorCores = 5,
  kShardingStrategy = 6,
  kPipeline = 7,
  kFeatureDescriptor = 10,
  kSpmdSharding = 11,
};
enum Table : uint32_t {
  kTableName = 1,
  kVocabularySize = 2,
  kDimension = 3,
  kOptimization = 5,
};
enum Feature : uint32_t { kFeatureName = 1, kTableId = 2, kInputShape = 3 };
}  // namespace field

Status ReadTable(Bytes bytes, int64_t index, TableSpec* table, int64_t* rows,
                 TpuRule* rule) {
  const std::string where = "Table " + to_string(index) + ": ";
  Bytes optimization;
  LM_RETURN_IF_ERROR(ForFields(bytes, where, [&](const WireField& one) {
    if (one.number == field::kTableName) table->name = AsString(one.bytes);
    if (one.number == field::kVocabularySize) *rows = one.AsInt();
    if (one.number == field::kDimension) table->dim = one.AsInt();
    if (one.number == field::kOptimization) optimization = one.bytes;
    return Status();
  }));
  const std::string named = "Table '" + table->name + "': ";
  LM_RETURN_IF_ERROR(CheckRange(named + "dimension", table->dim, 1, kMaxDim));
  LM_RETURN_IF_ERROR(
      CheckRange(named + "vocabulary_size", *rows, 1, kMaxNumRows));
  return ReadOptimizationParameters(optimization, table, rule);
}

Status ReadFeature(Bytes bytes, int64_t index, FeatureSpec* feature,
                   int64_t* table, std::vector<int64_t>* shape) {
  const std::string where = "Feature " + to_string(index) + ": ";
  LM_RETURN_IF_ERROR(ForFields(bytes, where, [&](const WireField& one) {
    if (one.number == field::kFeatureName) {
      feature->feature = AsString(one.bytes);
    }
    if (one.number == field::kTableId) *table = one.AsInt();
    if (one.number != field::kInputShape) return Status();
    if (one.type != WireType::kBytes) {
      shape->push_back(one.AsInt());
      return Status();
    }
    WireReader packed(one.bytes);
    int64_t size;
    while (packed.NextPacked(&size)) shape->push_back(size);
    return packed.is_malformed() ? MalformedBytes(where) : Status();
  }));
  // TensorFlow omits the name of a feature if the user has not set it.
  if (feature->feature.empty()) feature->feature = "#" + to_string(index);
  if (shape->empty()) {
    return InvalidArgument(where + "input_shape must have at least one axis");
  }
  int64_t num_outputs = 1;
  for (const int64_t size : *shape) {
    LM_RETURN_IF_ERROR(CheckRange(where + "an axis of input_shape", size, 1,
                                  kMaxNumOutputs / num_outputs));
    num_outputs *= size;
  }
  return Status();
}

// Values that are read from the fields before the tables are sharded and the
// features are assigned to tables.
struct Draft {
  int64_t num_hosts = 0;
  int64_t num_cores = 0;
  // Number of rows of each table.
  std::vector<int64_t> rows;
  // Table of each feature.
  std::vector<int64_t> table_of;
};

Status ReadField(const WireField& one, TpuConfig* config, Draft* draft) {
  EngineConfig& engine = config->engine;
  switch (one.number) {
    case field::kTableDescriptor: {
      TableSpec table;
      TpuRule rule;
      int64_t rows = 0;
      LM_RETURN_IF_ERROR(
          ReadTable(one.bytes, engine.tables.size(), &table, &rows, &rule));
      engine.tables.push_back(std::move(table));
      config->rules.push_back(std::move(rule));
      draft->rows.push_back(rows);
      return Status();
    }
    case field::kFeatureDescriptor: {
      FeatureSpec feature;
      std::vector<int64_t> shape;
      int64_t table = 0;
      LM_RETURN_IF_ERROR(ReadFeature(one.bytes, engine.features.size(),
                                     &feature, &table, &shape));
      engine.features.push_back(std::move(feature));
      config->output_shapes.push_back(std::move(shape));
      draft->table_of.push_back(table);
      return Status();
    }
    case field::kNumHosts:
      draft->num_hosts = one.AsInt();
      return Status();
    case field::kNumTensorCores:
      draft->num_cores = one.AsInt();
      return Status();
    case field::kShardingStrategy:
      if (one.AsInt() == 0) return Status();
      return InvalidArgument(
          "`sharding_strategy` must be 0 (DIV_DEFAULT) in the emulation. "
          "Received: sharding_strategy " +
          to_string(one.AsInt()));
    case field::kMode:
      if (one.AsInt() == 2) return Status();
      return InvalidArgument(
          "The mode of a configuration must be TRAINING; each enqueue sets "
          "its own mode. Received: mode " +
          to_string(one.AsInt()));
    case field::kPipeline:
      engine.is_pipelined = one.AsBool();
      return Status();
    case field::kSpmdSharding:
      return ForFields(one.bytes, "spmd_sharding", [](const WireField& spmd) {
        if (spmd.number != 1 || !spmd.AsBool()) return Status();
        return InvalidArgument(
            "The emulation supports one core per replica. Received: "
            "spmd_sharding");
      });
    default:
      return Status();
  }
}

Status ShardTables(const Draft& draft, TpuConfig* config) {
  for (size_t t = 0; t < draft.rows.size(); ++t) {
    const int64_t block = draft.rows[t] / draft.num_hosts;
    const int64_t longer = draft.rows[t] % draft.num_hosts;
    std::vector<int64_t> offsets = {0};
    for (int64_t host = 0; host < draft.num_hosts; ++host) {
      offsets.push_back(offsets.back() + block + (host < longer));
    }
    LM_RETURN_IF_ERROR(RowPartition::Make(Placement::kDiv, offsets,
                                          &config->engine.tables[t].partition));
  }
  return Status();
}

Status MatchFeatures(const Draft& draft, TpuConfig* config) {
  EngineConfig& engine = config->engine;
  for (size_t f = 0; f < engine.features.size(); ++f) {
    FeatureSpec& feature = engine.features[f];
    LM_RETURN_IF_ERROR(CheckRange("Feature '" + feature.feature + "': table_id",
                                  draft.table_of[f], 0,
                                  int64_t(engine.tables.size()) - 1));
    const TableSpec& table = engine.tables[draft.table_of[f]];
    engine.table_of_feature.push_back(static_cast<int32_t>(draft.table_of[f]));
    feature.table = table.name;
    feature.num_rows = table.partition.num_rows();
  }
  return Status();
}

Status CheckNames(const EngineConfig& engine) {
  std::set<std::string> names;
  for (const TableSpec& table : engine.tables) {
    if (names.insert(table.name).second) continue;
    return InvalidArgument("Two tables have the name '" + table.name + "'");
  }
  return Status();
}

Status CountRates(TpuConfig* config) {
  std::set<int32_t> tags;
  for (const TpuRule& rule : config->rules) {
    if (rule.dynamic_rate >= 0) tags.insert(rule.dynamic_rate);
  }
  config->num_rates = static_cast<int32_t>(tags.size());
  if (tags.empty() || *tags.rbegin() + 1 == config->num_rates) return Status();
  return InvalidArgument(
      "The tags of dynamic learning rates must be consecutive numbers from 0. "
      "Received: " +
      to_string(tags.size()) + " tags, the largest is " +
      to_string(*tags.rbegin()));
}

}  // namespace

int64_t TpuConfig::num_outputs(size_t f) const {
  return output_shapes[f][0] * outputs_per_sample(f);
}

int64_t TpuConfig::outputs_per_sample(size_t f) const {
  int64_t product = 1;
  for (size_t axis = 1; axis < output_shapes[f].size(); ++axis) {
    product *= output_shapes[f][axis];
  }
  return product;
}

Status ParseTpuConfig(Bytes bytes, TpuConfig* config) {
  TpuConfig parsed;
  Draft draft;
  LM_RETURN_IF_ERROR(ForFields(
      bytes, "a TPUEmbeddingConfiguration",
      [&](const WireField& one) { return ReadField(one, &parsed, &draft); }));
  LM_RETURN_IF_ERROR(CheckRange("num_hosts", draft.num_hosts, 1, kMaxNumHosts));
  LM_RETURN_IF_ERROR(
      CheckRange("num_tensor_cores", draft.num_cores, 1, kMaxNumCores));
  if (parsed.engine.features.empty()) {
    return InvalidArgument(
        "A configuration must describe its features (feature_descriptor); "
        "the configurations of the TensorFlow 1 API, which describe only "
        "tables, are not supported");
  }
  parsed.num_hosts = static_cast<int32_t>(draft.num_hosts);
  parsed.engine.num_replicas = static_cast<int32_t>(draft.num_cores);
  parsed.engine.max_pending_steps = kMaxPendingSteps;
  LM_RETURN_IF_ERROR(CheckNames(parsed.engine));
  LM_RETURN_IF_ERROR(ShardTables(draft, &parsed));
  LM_RETURN_IF_ERROR(MatchFeatures(draft, &parsed));
  LM_RETURN_IF_ERROR(CountRates(&parsed));
  *config = std::move(parsed);
  return Status();
}

}  // namespace layoutmap
