// Adagrad as Keras 3 computes it for the gradient of an `Embedding`: the
// gradient of each id is squared separately, so an id that occurs twice adds
// two squares. `Adagrad` squares the sum of the gradients instead. The classes
// of the other rules with the suffix `_per_id` have both versions.
//
//   a += sum of g^2 over the gradients of the row
//   p -= lr (sum of g) / sqrt(a)

#ifndef TF_LAYOUTMAP_CORE_OPTIMIZERS_ADAGRAD_PER_ID_H_
#define TF_LAYOUTMAP_CORE_OPTIMIZERS_ADAGRAD_PER_ID_H_

#include "cc/core/simd/vector.h"

namespace layoutmap {
namespace LM_ISA {

struct AdagradPerId {
  static constexpr int kNumSlots = 1;

  explicit AdagradPerId(const float* hyperparameters)
      : lr(hyperparameters[0]) {}

  // `g` is the sum of the gradients, and `squares` the sum of their squares.
  template <typename V>
  void operator()(V g, V squares, V* p, V* slots) const {
    V& a = slots[0];
    a += squares;
    *p -= lr * g / Sqrt(a);
  }

  float lr;
};

}  // namespace LM_ISA
}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_OPTIMIZERS_ADAGRAD_PER_ID_H_
