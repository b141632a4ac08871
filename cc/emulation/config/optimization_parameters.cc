#include "cc/emulation/config/optimization_parameters.h"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/tables/quantization.h"
#include "cc/emulation/config/read_fields.h"
#include "cc/emulation/config/wire_reader.h"

namespace layoutmap {
namespace {

using std::to_string;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Field numbers from optimization_parameters.proto.
namespace field {
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

struct Limits {
  float lower = -kInfinity;
  float upper = kInfinity;
};

Status ReadLimits(Bytes bytes, const std::string& what, Limits* limits) {
  return ForFields(bytes, what, [&](const WireField& side) {
    // The message is a FloatValue. Its field 1 is omitted if the value is 0.
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

// The settings of one table.
struct Settings {
  Optimizer optimizer = Optimizer::kNone;
  // The hyperparameters after the learning rate.
  std::vector<float> constants;
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
    // Tags are consecutive, and there are at most as many tags as tables, so
    // the limit exceeds every valid tag.
    LM_RETURN_IF_ERROR(
        CheckRange(where + "the tag of a learning rate", tag, 0, 1 << 20));
    settings->dynamic_rate = static_cast<int32_t>(tag);
    return Status();
  });
}

// Reads fields of an optimizer's message into `settings->constants`. `numbers`
// are the field numbers, in the order of the constants. Each field is a float
// or a bool.
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
      // The fields are momentum, use_nesterov, exponent, beta2 and epsilon.
      settings->optimizer = Optimizer::kAdagradMomentum;
      LM_RETURN_IF_ERROR(
          ReadConstants(one.bytes, where, {1, 2, 3, 4, 5}, settings));
      if (settings->constants[2] > 0) return Status();
      return InvalidArgument(where +
                             "the exponent of AdagradMomentum must be greater "
                             "than 0. Received: " +
                             to_string(settings->constants[2]));
    case field::kAdam:
      // The fields are beta1, beta2, epsilon, use_sum_inside_sqrt and
      // use_non_lazy_adam.
      settings->optimizer = Optimizer::kAdam;
      LM_RETURN_IF_ERROR(
          ReadConstants(one.bytes, where, {3, 4, 5, 10, 8}, settings));
      settings->constants[4] =
          // Converts use_non_lazy_adam to `lazy`.
          settings->constants[4] == 0;
      return Status();
    case field::kFtrl:
      // The fields are lr_power, l1, l2, beta and multiply_linear_by_lr.
      settings->optimizer = Optimizer::kFtrl;
      return ReadConstants(one.bytes, where, {3, 1, 2, 7, 6}, settings);
    case field::kHotIdReplication:
    case field::kLowDimensionalPacking:
      // These settings affect how a TPU stores the table, but not the values in
      // the table.
      return Status();
    default:
      return InvalidArgument(where +
                             "the optimizer must be one that the emulation "
                             "supports: SGD, Adagrad, "
                             "AdagradMomentum, Adam or FTRL. Received: field " +
                             to_string(one.number) +
                             " of OptimizationParameters");
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
        // The value 2 means DISABLED.
        settings->accumulate = one.AsInt() != 2;
        return Status();
      case field::kSimulatedQuantization:
        return ReadQuantization(one.bytes, where, table);
      default:
        return ReadRule(one, where, settings);
    }
  });
}

// Returns the hyperparameters in the order of the engine. The modifiers are
// included only if at least one modifier is set.
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
    return InvalidArgument(where + "its configuration must set an optimizer");
  }
  if (!settings.accumulate && (settings.gradient.lower != -kInfinity ||
                               settings.gradient.upper != kInfinity)) {
    return InvalidArgument(where +
                           "gradient clipping requires gradient accumulation, "
                           "because it is applied to the sum of the gradients");
  }
  if (!settings.accumulate &&
      TouchesAllRows(settings.optimizer, hyperparameters)) {
    return InvalidArgument(
        where +
        "Adam with lazy_adam=False requires gradient "
        "accumulation, because it updates each row once per step");
  }
  std::vector<float> checked = hyperparameters;
  // A dynamic learning rate is checked when a step passes its value.
  if (settings.dynamic_rate >= 0) checked[0] = 1;
  return CheckHyperparameters(settings.optimizer, table, checked);
}

}  // namespace

Status ReadOptimizationParameters(Bytes bytes, TableSpec* table,
                                  TpuRule* rule) {
  Settings settings;
  LM_RETURN_IF_ERROR(ReadOptimization(
      bytes, "Table '" + table->name + "': ", &settings, table));
  table->optimizer = settings.optimizer;
  rule->dynamic_rate = settings.dynamic_rate;
  rule->hyperparameters = Hyperparameters(settings);
  return CheckSettings(settings, table->name, rule->hyperparameters);
}

}  // namespace layoutmap
