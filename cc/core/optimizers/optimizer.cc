#include "cc/core/optimizers/optimizer.h"

#include <cmath>
#include <cstdint>
#include <string>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/simd/row_kernels.h"

namespace layoutmap {
namespace {

struct OptimizerInfo {
  Optimizer optimizer;
  const char* name;
  int num_slots;
  int num_hyperparameters;
  // Index of the slot variable with one value per row, or -1 if there is none.
  int slot_per_row = -1;
  bool takes_modifiers = true;
};

constexpr OptimizerInfo kOptimizers[] = {
    {Optimizer::kNone, "none", 0, 0},
    {Optimizer::kSgd, "sgd", 0, 1},
    {Optimizer::kAdagrad, "adagrad", 1, 1},
    {Optimizer::kAdagradPerId, "adagrad_per_id", 1, 1, -1, false},
    {Optimizer::kAdagradMomentum, "adagrad_momentum", 2, 6},
    {Optimizer::kAdam, "adam", 2, 6},
    {Optimizer::kAdamPerId, "adam_per_id", 2, 6, -1, false},
    {Optimizer::kFtrl, "ftrl", 2, 6},
    {Optimizer::kFtrlPerId, "ftrl_per_id", 2, 6, -1, false},
    {Optimizer::kMomentum, "momentum", 1, 3},
    {Optimizer::kRmsprop, "rmsprop", 1, 3},
    {Optimizer::kRmspropPerId, "rmsprop_per_id", 1, 3, -1, false},
    {Optimizer::kRowwiseAdagrad, "rowwise_adagrad", 1, 2, 0},
    {Optimizer::kLamb, "lamb", 3, 5, 2},
};

constexpr int kAdamLazy = 5;
constexpr int kFtrlMultiplyLinearByLr = 5;

const OptimizerInfo& Info(Optimizer optimizer) {
  for (const OptimizerInfo& info : kOptimizers) {
    if (info.optimizer == optimizer) return info;
  }
  return kOptimizers[0];
}

}  // namespace

Status ParseOptimizer(const std::string& name, Optimizer* optimizer) {
  std::string names;
  for (const OptimizerInfo& info : kOptimizers) {
    if (name == info.name) {
      *optimizer = info.optimizer;
      return Status();
    }
    names += std::string(names.empty() ? "" : ", ") + info.name;
  }
  return InvalidArgument("`optimizer` must be one of " + names +
                         ". Received: " + name);
}

int NumSlots(Optimizer optimizer) { return Info(optimizer).num_slots; }

int64_t SlotDim(Optimizer optimizer, int slot, int64_t dim) {
  return slot == Info(optimizer).slot_per_row ? 1 : dim;
}

bool HasModifiers(Optimizer optimizer, Span<const float> hyperparameters) {
  const OptimizerInfo& info = Info(optimizer);
  return info.takes_modifiers &&
         hyperparameters.size() == info.num_hyperparameters + kNumModifiers;
}

Status CheckHyperparameters(Optimizer optimizer, const std::string& table,
                            Span<const float> hyperparameters) {
  const int expected = Info(optimizer).num_hyperparameters;
  const std::string where = "Table '" + table + "': ";
  const bool modified =
      expected > 0 && HasModifiers(optimizer, hyperparameters);
  if (hyperparameters.size() != expected && !modified) {
    return InvalidArgument(where + "its optimizer takes " +
                           std::to_string(expected) +
                           " hyperparameters. Received: " +
                           std::to_string(hyperparameters.size()));
  }
  for (int64_t i = 0; i < hyperparameters.size(); ++i) {
    const float value = hyperparameters[i];
    const bool bad = i < expected ? !std::isfinite(value) : std::isnan(value);
    if (i > 0 && bad) {
      return InvalidArgument(where + "hyperparameter " + std::to_string(i) +
                             " of its optimizer must be finite. Received: " +
                             std::to_string(value));
    }
  }
  if (expected == 0) return Status();
  const float rate = hyperparameters[0];
  if (!(std::isfinite(rate) && rate >= 0)) {
    return InvalidArgument(
        where + "the learning rate must be finite and at least 0. Received: " +
        std::to_string(rate));
  }
  const bool is_ftrl =
      optimizer == Optimizer::kFtrl || optimizer == Optimizer::kFtrlPerId;
  if (is_ftrl && rate == 0 && hyperparameters[kFtrlMultiplyLinearByLr] == 0) {
    return InvalidArgument(where +
                           "FTRL divides by the learning rate, which must be "
                           "above 0 unless multiply_linear_by_learning_rate "
                           "is set. Received: 0");
  }
  return Status();
}

Modifiers ReadModifiers(Optimizer optimizer,
                        Span<const float> hyperparameters) {
  const float* m = hyperparameters.data() + Info(optimizer).num_hyperparameters;
  Modifiers modifiers;
  modifiers.clip_gradient_min = m[0];
  modifiers.clip_gradient_max = m[1];
  modifiers.weight_decay = m[3] != 0 ? m[2] * hyperparameters[0] : m[2];
  modifiers.clip_weight_min = m[4];
  modifiers.clip_weight_max = m[5];
  modifiers.accumulate = m[6] != 0;
  return modifiers;
}

bool TouchesAllRows(Optimizer optimizer, Span<const float> hyperparameters) {
  return optimizer == Optimizer::kAdam && hyperparameters[kAdamLazy] == 0;
}

}  // namespace layoutmap
