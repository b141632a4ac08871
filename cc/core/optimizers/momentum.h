// SGD with momentum as Keras computes it. The momenta contain the learning rate
// of each step, so a later change of the learning rate affects new gradients
// only.
//
//   m = mu m + lr g
//   p -= m                     (mu m + lr g with Nesterov)

#ifndef TF_LAYOUTMAP_CORE_OPTIMIZERS_MOMENTUM_H_
#define TF_LAYOUTMAP_CORE_OPTIMIZERS_MOMENTUM_H_

#include "cc/core/simd/vector.h"

namespace layoutmap {
namespace LM_ISA {

struct Momentum {
  static constexpr int kNumSlots = 1;  // Momenta.

  explicit Momentum(const float* h)
      : lr(h[0]), mu(h[1]), use_nesterov(h[2] != 0) {}

  template <typename V>
  void operator()(V g, V* p, V* slots) const {
    V& m = slots[0];
    m = mu * m + lr * g;
    *p -= use_nesterov ? mu * m + lr * g : m;
  }

  float lr;
  float mu;
  bool use_nesterov;
};

}  // namespace LM_ISA
}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_OPTIMIZERS_MOMENTUM_H_
