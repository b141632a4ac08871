#include "cc/emulation/config/tpu_config.h"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/engine/engine_config.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/tables/quantization.h"
#include "cc/emulation/config/wire_reader.h"

namespace layoutmap {
namespace {

using std::to_string;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kMaxNumRows = int64_t{1} << 32;
// Shards and cores have entries of their own in several lists, so that bytes
// that ask for more than any pod has must not be believed.
constexpr int64_t kMaxNumHosts = 1 << 10;
constexpr int64_t kMaxNumCores = 1 << 14;
constexpr int64_t kMaxNumOutputs = INT32_MAX;
constexpr int64_t kMaxDim = 1 << 20;
// Batches that wait for a core before `enqueue` waits, too. What a TPU's queue
// holds is not public; this is more than programs put into it.
constexpr int64_t kMaxPendingSteps = 32;

// Field numbers of tpu_embedding_configuration.proto and
// optimization_parameters.proto.
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
enum Optimization : uint32_t {
  kClippingLimits = 2,
  kAdagrad = 3,
  kStochasticGradientDescent = 4,
  kFtrl = 5,
  kAdam = 6,
  kGradientClippingLimits = 7,
  kLearningRate = 13,
  kWeightDecay = 16,
  kGradientAccumulation = 17,
  kHotIdReplication = 18,
  kDecayTimesRate = 22,
  kAdagradMomentum = 26,
  kSimulatedQuantization = 27,
  kLowDimensionalPacking = 28,
};
}  // namespace field

Status Malformed(const std::string& what) {
  return InvalidArgument("The bytes of " + what +
                         " are no protocol buffer of that kind");
}

// Calls `visit(field)` for each field of a message.
template <typename Visit>
Status ForFields(Bytes bytes, const std::string& what, const Visit& visit) {
  WireReader reader(bytes);
  WireField one;
  while (reader.Next(&one)) LM_RETURN_IF_ERROR(visit(one));
  return reader.is_malformed() ? Malformed(what) : Status();
}

std::string AsString(Bytes bytes) {
  return std::string(bytes.begin(), bytes.end());
}

Status CheckRange(const std::string& what, int64_t value, int64_t low,
                  int64_t high) {
  if (value >= low && value <= high) return Status();
  return InvalidArgument(what + " must be in [" + to_string(low) + ", " +
                         to_string(high) + "]. Received: " + to_string(value));
}

struct Limits {
  float lower = -kInfinity;
  float upper = kInfinity;
};

Status ReadLimits(Bytes bytes, const std::string& what, Limits* limits) {
  return ForFields(bytes, what, [&](const WireField& side) {
    // A FloatValue, whose field 1 is left out if it is 0.
    float value = 0;
    LM_RETURN_IF_ERROR(ForFields(side.bytes, what, [&](const WireField& one) {
      if (one.number == 1) value = one.AsFloat();
      return Status();
    }));
    if (side.number == 1) limits->lower = value;
    if (side.number == 2) limits->upper = value;
    return Status();
  });
}

// The settings of one table; each reader takes a field it knows.
struct Settings {
  Optimizer optimizer = Optimizer::kNone;
  std::vector<float> constants;  // of the rule, behind the learning rate
  float rate = 0;
  int32_t dynamic_rate = -1;
  Limits gradient;
  Limits weight;
  float decay = 0;
  bool decay_times_rate = false;
  bool accumulate = true;
};

Status ReadRate(Bytes bytes, const std::string& where, Settings* settings) {
  return ForFields(bytes, where, [&](const WireField& one) {
    if (one.number == 1) settings->rate = one.AsFloat();
    if (one.number != 2) return Status();
    int64_t tag = 0;
    LM_RETURN_IF_ERROR(ForFields(one.bytes, where, [&](const WireField& t) {
      if (t.number == 1) tag = t.AsInt();
      return Status();
    }));
    // Tags are dense, and there are no more of them than tables.
    LM_RETURN_IF_ERROR(
        CheckRange(where + "the tag of a learning rate", tag, 0, 1 << 20));
    settings->dynamic_rate = static_cast<int32_t>(tag);
    return Status();
  });
}

// Reads the fields `numbers` of a rule's message, floats and bools alike, into
// the places they have among its constants.
Status ReadConstants(Bytes bytes, const std::string& where,
                     const std::vector<uint32_t>& numbers, Settings* settings) {
  settings->constants.assign(numbers.size(), 0);
  return ForFields(bytes, where, [&](const WireField& one) {
    for (size_t i = 0; i < numbers.size(); ++i) {
      if (one.number != numbers[i]) continue;
      settings->constants[i] = one.type == WireType::kFixed32
                                   ? one.AsFloat()
                                   : static_cast<float>(one.AsBool());
    }
    return Status();
  });
}

Status ReadRule(const WireField& one, const std::string& where,
                Settings* settings) {
  switch (one.number) {
    case field::kStochasticGradientDescent:
      settings->optimizer = Optimizer::kSgd;
      return ReadConstants(one.bytes, where, {}, settings);
    case field::kAdagrad:
      settings->optimizer = Optimizer::kAdagrad;
      return ReadConstants(one.bytes, where, {}, settings);
    case field::kAdagradMomentum:
      // momentum, use_nesterov, exponent, beta2, epsilon
      settings->optimizer = Optimizer::kAdagradMomentum;
      LM_RETURN_IF_ERROR(
          ReadConstants(one.bytes, where, {1, 2, 3, 4, 5}, settings));
      if (settings->constants[2] > 0) return Status();
      return InvalidArgument(where +
                             "AdagradMomentum's exponent must be above "
                             "0. Received: " +
                             to_string(settings->constants[2]));
    case field::kAdam:
      // beta1, beta2, epsilon, use_sum_inside_sqrt, use_non_lazy_adam
      settings->optimizer = Optimizer::kAdam;
      LM_RETURN_IF_ERROR(
          ReadConstants(one.bytes, where, {3, 4, 5, 10, 8}, settings));
      settings->constants[4] = settings->constants[4] == 0;  // lazy
      return Status();
    case field::kFtrl:
      // lr_power, l1, l2, beta, multiply_linear_by_lr
      settings->optimizer = Optimizer::kFtrl;
      return ReadConstants(one.bytes, where, {3, 1, 2, 7, 6}, settings);
    case field::kHotIdReplication:
    case field::kLowDimensionalPacking:
      return Status();  // where rows lie, not what they are
    default:
      return InvalidArgument(
          where +
          "the emulation has the optimizers SGD, Adagrad, "
          "AdagradMomentum, Adam and FTRL. Received: field " +
          to_string(one.number) + " of OptimizationParameters");
  }
}

Status ReadQuantization(Bytes bytes, const std::string& where,
                        TableSpec* table) {
  Limits limits;
  int64_t num_buckets = 0;
  bool enabled = false;
  LM_RETURN_IF_ERROR(ForFields(bytes, where, [&](const WireField& one) {
    if (one.number == 1) enabled = one.AsBool();
    if (one.number == 3) num_buckets = one.AsInt();
    return one.number == 2 ? ReadLimits(one.bytes, where, &limits) : Status();
  }));
  table->is_quantized = enabled;
  if (!enabled) return Status();
  return MakeQuantization(limits.lower, limits.upper, num_buckets, table->name,
                          &table->quantization);
}

Status ReadOptimization(Bytes bytes, const std::string& where,
                        Settings* settings, TableSpec* table) {
  return ForFields(bytes, where, [&](const WireField& one) {
    switch (one.number) {
      case field::kLearningRate:
        return ReadRate(one.bytes, where, settings);
      case field::kClippingLimits:
        return ReadLimits(one.bytes, where, &settings->weight);
      case field::kGradientClippingLimits:
        return ReadLimits(one.bytes, where, &settings->gradient);
      case field::kWeightDecay:
        settings->decay = one.AsFloat();
        return Status();
      case field::kDecayTimesRate:
        settings->decay_times_rate = one.AsBool();
        return Status();
      case field::kGradientAccumulation:
        settings->accumulate = one.AsInt() != 2;  // DISABLED
        return Status();
      case field::kSimulatedQuantization:
        return ReadQuantization(one.bytes, where, table);
      default:
        return ReadRule(one, where, settings);
    }
  });
}

// The numbers of a rule in the engine's order; modifiers only if there are any.
std::vector<float> Hyperparameters(const Settings& settings) {
  std::vector<float> all = {settings.rate};
  all.insert(all.end(), settings.constants.begin(), settings.constants.end());
  const std::vector<float> none = {-kInfinity, kInfinity, 0, 0,
                                   -kInfinity, kInfinity, 1};
  const std::vector<float> modifiers = {
      settings.gradient.lower,
      settings.gradient.upper,
      settings.decay,
      static_cast<float>(settings.decay_times_rate),
      settings.weight.lower,
      settings.weight.upper,
      static_cast<float>(settings.accumulate)};
  if (modifiers != none) {
    all.insert(all.end(), modifiers.begin(), modifiers.end());
  }
  return all;
}

Status CheckSettings(const Settings& settings, const std::string& table,
                     const std::vector<float>& hyperparameters) {
  const std::string where = "Table '" + table + "': ";
  if (settings.optimizer == Optimizer::kNone) {
    return InvalidArgument(where + "its configuration names no optimizer");
  }
  if (!settings.accumulate && (settings.gradient.lower != -kInfinity ||
                               settings.gradient.upper != kInfinity)) {
    return InvalidArgument(where +
                           "gradients are clipped when they are summed, so "
                           "clipping needs gradient accumulation");
  }
  if (!settings.accumulate &&
      TouchesAllRows(settings.optimizer, hyperparameters)) {
    return InvalidArgument(where +
                           "Adam that is not lazy moves each row once per "
                           "step, so it needs gradient accumulation");
  }
  std::vector<float> checked = hyperparameters;
  // One that comes with the step is checked then.
  if (settings.dynamic_rate >= 0) checked[0] = 1;
  return CheckHyperparameters(settings.optimizer, table, checked);
}

Status ReadTable(Bytes bytes, int64_t index, TableSpec* table, int64_t* rows,
                 TpuRule* rule) {
  Settings settings;
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
  LM_RETURN_IF_ERROR(ReadOptimization(optimization, named, &settings, table));
  table->optimizer = settings.optimizer;
  rule->dynamic_rate = settings.dynamic_rate;
  rule->hyperparameters = Hyperparameters(settings);
  return CheckSettings(settings, table->name, rule->hyperparameters);
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
    return packed.is_malformed() ? Malformed(where) : Status();
  }));
  // TensorFlow leaves it out where the user has given none.
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

// What `ForFields` collects before tables and features can be cut and paired.
struct Draft {
  int64_t num_hosts = 0;
  int64_t num_cores = 0;
  std::vector<int64_t> rows;      // by table
  std::vector<int64_t> table_of;  // by feature
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
          "The emulation cuts tables into blocks (DIV_DEFAULT). Received: "
          "sharding_strategy " +
          to_string(one.AsInt()));
    case field::kMode:
      if (one.AsInt() == 2) return Status();
      return InvalidArgument(
          "The mode of a configuration must be TRAINING; each enqueue says "
          "what it is. Received: mode " +
          to_string(one.AsInt()));
    case field::kPipeline:
      engine.is_pipelined = one.AsBool();
      return Status();
    case field::kSpmdSharding:
      return ForFields(one.bytes, "spmd_sharding", [](const WireField& spmd) {
        if (spmd.number != 1 || !spmd.AsBool()) return Status();
        return InvalidArgument(
            "The emulation has one core per replica. Received: spmd_sharding");
      });
    default:
      return Status();
  }
}

Status CutTables(const Draft& draft, TpuConfig* config) {
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

Status PairFeatures(const Draft& draft, TpuConfig* config) {
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
      "The tags of dynamic learning rates must be numbered from 0 on. "
      "Received: " +
      to_string(tags.size()) + " tags, the highest " +
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
        "those of the TensorFlow 1 API, which describes tables only, are not "
        "emulated");
  }
  parsed.num_hosts = static_cast<int32_t>(draft.num_hosts);
  parsed.engine.num_replicas = static_cast<int32_t>(draft.num_cores);
  parsed.engine.max_pending_steps = kMaxPendingSteps;
  LM_RETURN_IF_ERROR(CheckNames(parsed.engine));
  LM_RETURN_IF_ERROR(CutTables(draft, &parsed));
  LM_RETURN_IF_ERROR(PairFeatures(draft, &parsed));
  LM_RETURN_IF_ERROR(CountRates(&parsed));
  *config = std::move(parsed);
  return Status();
}

}  // namespace layoutmap
