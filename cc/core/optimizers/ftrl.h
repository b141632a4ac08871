// FTRL-Proximal (McMahan et al., KDD 2013) as implemented by the TPU engine,
// with q = -learning_rate_power:
//
//   a' = a + g^2
//   l += g - p (a'^q - a^q) / lr
//   Q = (a'^q + beta) / lr + 2 l2
//   p = |l| > l1 ? (sign(l) l1 - l) / Q : 0
//
// If multiply_linear_by_lr is set, the slot variable stores lr l instead of l.
// Every term above is then multiplied by lr, so that lr may be 0.

#ifndef TF_LAYOUTMAP_CORE_OPTIMIZERS_FTRL_H_
#define TF_LAYOUTMAP_CORE_OPTIMIZERS_FTRL_H_

#include "cc/core/simd/vector.h"

namespace layoutmap {
namespace LM_ISA {

struct Ftrl {
  static constexpr int kNumSlots = 2;  // Accumulators, linears.

  explicit Ftrl(const float* h)
      : lr(h[0]),
        q(-h[1]),
        l1(h[2]),
        l2(h[3]),
        beta(h[4]),
        multiply_linear_by_lr(h[5] != 0) {}

  template <typename V>
  V Power(V a) const {
    return q == 0.5f ? Sqrt(a) : Pow(a, q);
  }

  template <typename V>
  void operator()(V g, V* p, V* slots) const {
    const V squares = g * g;
    (*this)(g, squares, p, slots);
  }

  // `squares` replaces g^2 in a rule that squares each gradient of a row.
  template <typename V>
  void operator()(V g, V squares, V* p, V* slots) const {
    V& a = slots[0];
    V& l = slots[1];
    const V a_new = a + squares;
    const V power = Power(a_new);
    const V sigma = power - Power(a);
    a = a_new;
    V threshold, quotient;
    if (multiply_linear_by_lr) {
      l += lr * g - sigma * *p;
      threshold = Fill<V>(lr * l1);
      quotient = power + beta + 2 * lr * l2;
    } else {
      l += g - sigma / lr * *p;
      threshold = Fill<V>(l1);
      quotient = (power + beta) / lr + 2 * l2;
    }
    const V pulled = (l < V{} ? -threshold : threshold) - l;
    *p = Abs(l) > threshold ? pulled / quotient : V{};
  }

  float lr;
  float q;
  float l1;
  float l2;
  float beta;
  bool multiply_linear_by_lr;
};

}  // namespace LM_ISA
}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_OPTIMIZERS_FTRL_H_
