// The names of the update rules, and the checks of their hyperparameters.

#ifndef TF_LAYOUTMAP_CORE_OPTIMIZERS_OPTIMIZER_H_
#define TF_LAYOUTMAP_CORE_OPTIMIZERS_OPTIMIZER_H_

#include <cstdint>
#include <string>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/simd/row_kernels.h"

namespace layoutmap {

Status ParseOptimizer(const std::string& name, Optimizer* optimizer);
int NumSlots(Optimizer optimizer);
// Returns the number of columns of a slot variable. The result is 1 if the slot
// variable has one value per row, and `dim` otherwise.
int64_t SlotDim(Optimizer optimizer, int slot, int64_t dim);

// The hyperparameters of each rule, in order:
//
//   sgd               learning_rate
//   adagrad           learning_rate
//   adagrad_per_id    learning_rate
//   adagrad_momentum  learning_rate, momentum, use_nesterov, exponent, beta_2,
//                     epsilon
//   adam              learning_rate, beta_1, beta_2, epsilon,
//                     sum_inside_sqrt, lazy
//   adam_per_id       as adam; lazy has no effect
//   ftrl              learning_rate, learning_rate_power, l1, l2, beta,
//                     multiply_linear_by_lr
//   ftrl_per_id       as ftrl
//   momentum          learning_rate, momentum, use_nesterov
//   rmsprop           learning_rate, rho, epsilon
//   rmsprop_per_id    as rmsprop
//   rowwise_adagrad   learning_rate, epsilon
//   lamb              learning_rate, beta_1, beta_2, epsilon, weight_decay
//
// The modifiers can follow these values. A list contains either all modifiers,
// in this order, or none of them. The rules with the suffix _per_id, which
// square each gradient of a row separately, have no modifiers:
//
//   clip_gradient_min, clip_gradient_max, weight_decay,
//   multiply_weight_decay_by_lr, clip_weight_min, clip_weight_max, accumulate
//
// The value of a flag is 0 or 1. If a limit is not set, its value is infinite.
constexpr int kNumModifiers = 7;

// Returns an error if the number of values is wrong, if a value other than a
// limit is not finite, or if the learning rate is below 0. `table` is the table
// name in error messages.
Status CheckHyperparameters(Optimizer optimizer, const std::string& table,
                            Span<const float> hyperparameters);

// These functions require hyperparameters that `CheckHyperparameters` accepts.
bool HasModifiers(Optimizer optimizer, Span<const float> hyperparameters);
Modifiers ReadModifiers(Optimizer optimizer, Span<const float> hyperparameters);

// Returns whether a step also updates rows that were not looked up. Such
// updates are necessary if the momenta of these rows decay and continue to
// change the rows.
bool TouchesAllRows(Optimizer optimizer, Span<const float> hyperparameters);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_OPTIMIZERS_OPTIMIZER_H_
