// Adagrad with momentum, as implemented by the TPU engine.
//
//   a = b a + (1 - b) g^2      (a + g^2 if b is 1)
//   s = g (a + epsilon)^(-1 / exponent)
//   m = mu m + s
//   p -= lr m                  (lr (mu m + s) with Nesterov)

#ifndef TF_LAYOUTMAP_CORE_OPTIMIZERS_ADAGRAD_MOMENTUM_H_
#define TF_LAYOUTMAP_CORE_OPTIMIZERS_ADAGRAD_MOMENTUM_H_

#include "cc/core/simd/vector.h"

namespace layoutmap {
namespace LM_ISA {

struct AdagradMomentum {
  static constexpr int kNumSlots = 2;  // Accumulators, momenta.

  explicit AdagradMomentum(const float* h)
      : lr(h[0]),
        mu(h[1]),
        use_nesterov(h[2] != 0),
        exponent(h[3]),
        beta_2(h[4]),
        epsilon(h[5]) {}

  template <typename V>
  void operator()(V g, V* p, V* slots) const {
    V& a = slots[0];
    V& m = slots[1];
    a = beta_2 == 1 ? a + g * g : beta_2 * a + (1 - beta_2) * (g * g);
    const V s = exponent == 2 ? g / Sqrt(a + epsilon)
                              : g * Pow(a + epsilon, -1 / exponent);
    m = mu * m + s;
    *p -= lr * (use_nesterov ? mu * m + s : m);
  }

  float lr;
  float mu;
  bool use_nesterov;
  float exponent;
  float beta_2;
  float epsilon;
};

}  // namespace LM_ISA
}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_OPTIMIZERS_ADAGRAD_MOMENTUM_H_
