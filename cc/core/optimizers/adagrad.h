// Adagrad (Duchi et al., JMLR 2011) as implemented by the TPU engine. There is
// no epsilon, and the initial value of the accumulator `a` must be above 0.
//
//   a += g^2
//   p -= lr g / sqrt(a)

#ifndef TF_LAYOUTMAP_CORE_OPTIMIZERS_ADAGRAD_H_
#define TF_LAYOUTMAP_CORE_OPTIMIZERS_ADAGRAD_H_

#include "cc/core/simd/vector.h"

namespace layoutmap {
namespace LM_ISA {

struct Adagrad {
  static constexpr int kNumSlots = 1;

  explicit Adagrad(const float* hyperparameters) : lr(hyperparameters[0]) {}

  template <typename V>
  void operator()(V g, V* p, V* slots) const {
    V& a = slots[0];
    a += g * g;
    *p -= lr * g / Sqrt(a);
  }

  float lr;
};

}  // namespace LM_ISA
}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_OPTIMIZERS_ADAGRAD_H_
