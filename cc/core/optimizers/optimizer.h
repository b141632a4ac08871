// The update rules by name, and what their numbers must be.

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
// Columns of a slot variable whose table has `dim`: so many, or 1 where a row
// has one value of it.
int64_t SlotDim(Optimizer optimizer, int slot, int64_t dim);

// The numbers of a rule, as they come in one list:
//
//   sgd               learning_rate
//   adagrad           learning_rate
//   adagrad_momentum  learning_rate, momentum, use_nesterov, exponent, beta_2,
//                     epsilon
//   adam              learning_rate, beta_1, beta_2, epsilon,
//                     sum_inside_sqrt, lazy
//   ftrl              learning_rate, learning_rate_power, l1, l2, beta,
//                     multiply_linear_by_lr
//   rowwise_adagrad   learning_rate, epsilon
//   lamb              learning_rate, beta_1, beta_2, epsilon, weight_decay
//
// perhaps followed by all of the modifiers:
//
//   clip_gradient_min, clip_gradient_max, weight_decay,
//   multiply_weight_decay_by_lr, clip_weight_min, clip_weight_max, accumulate
//
// Flags are 0 or 1; a limit that is not set is infinite.
constexpr int kNumModifiers = 7;

// Refuses a wrong number of values, any that is not finite (limits may be
// infinite), and a learning rate below 0. `table` is for the message.
Status CheckHyperparameters(Optimizer optimizer, const std::string& table,
                            Span<const float> hyperparameters);

// Of checked hyperparameters.
bool HasModifiers(Optimizer optimizer, Span<const float> hyperparameters);
Modifiers ReadModifiers(Optimizer optimizer, Span<const float> hyperparameters);

// Whether a step moves the rows that it did not look up, too: momenta decay
// there and go on moving them.
bool TouchesAllRows(Optimizer optimizer, Span<const float> hyperparameters);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_OPTIMIZERS_OPTIMIZER_H_
