// RMSprop (Hinton, 2012) as Keras computes it, without momentum.
//
//   v = rho v + (1 - rho) g^2
//   p -= lr g / sqrt(v + epsilon)

#ifndef TF_LAYOUTMAP_CORE_OPTIMIZERS_RMSPROP_H_
#define TF_LAYOUTMAP_CORE_OPTIMIZERS_RMSPROP_H_

#include "cc/core/simd/vector.h"

namespace layoutmap {
namespace LM_ISA {

struct Rmsprop {
  static constexpr int kNumSlots = 1;  // Velocities.

  explicit Rmsprop(const float* h) : lr(h[0]), rho(h[1]), epsilon(h[2]) {}

  template <typename V>
  void operator()(V g, V* p, V* slots) const {
    const V squares = g * g;
    (*this)(g, squares, p, slots);
  }

  // `squares` replaces g^2 in a rule that squares each gradient of a row.
  template <typename V>
  void operator()(V g, V squares, V* p, V* slots) const {
    V& v = slots[0];
    v = rho * v + (1 - rho) * squares;
    *p -= lr * g / Sqrt(v + epsilon);
  }

  float lr;
  float rho;
  float epsilon;
};

}  // namespace LM_ISA
}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_OPTIMIZERS_RMSPROP_H_
