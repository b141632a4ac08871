// Adam (Kingma and Ba, ICLR 2015) as implemented by the TPU engine. The update
// has no bias correction. A program can apply it through a dynamic learning
// rate of lr sqrt(1 - beta_2^t) / (1 - beta_1^t).
//
//   m = beta_1 m + (1 - beta_1) g
//   v = beta_2 v + (1 - beta_2) g^2
//   p -= lr m / sqrt(v + epsilon^2)   (sum inside the root)
//   p -= lr m / (sqrt(v) + epsilon)   (outside)
//
// The caller decides whether rows without a gradient are also updated (not
// lazy).

#ifndef TF_LAYOUTMAP_CORE_OPTIMIZERS_ADAM_H_
#define TF_LAYOUTMAP_CORE_OPTIMIZERS_ADAM_H_

#include "cc/core/simd/vector.h"

namespace layoutmap {
namespace LM_ISA {

struct Adam {
  static constexpr int kNumSlots = 2;  // Momenta, velocities.

  explicit Adam(const float* h)
      : lr(h[0]),
        beta_1(h[1]),
        beta_2(h[2]),
        epsilon(h[3]),
        sum_inside_sqrt(h[4] != 0) {}

  template <typename V>
  void operator()(V g, V* p, V* slots) const {
    const V squares = g * g;
    (*this)(g, squares, p, slots);
  }

  // `squares` replaces g^2 in a rule that squares each gradient of a row.
  template <typename V>
  void operator()(V g, V squares, V* p, V* slots) const {
    V& m = slots[0];
    V& v = slots[1];
    m = beta_1 * m + (1 - beta_1) * g;
    v = beta_2 * v + (1 - beta_2) * squares;
    const V root =
        sum_inside_sqrt ? Sqrt(v + epsilon * epsilon) : Sqrt(v) + epsilon;
    *p -= lr * m / root;
  }

  float lr;
  float beta_1;
  float beta_2;
  float epsilon;
  bool sum_inside_sqrt;
};

}  // namespace LM_ISA
}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_OPTIMIZERS_ADAM_H_
