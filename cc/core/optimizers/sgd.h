// SGD without slot variables.
//
//   p -= lr g

#ifndef TF_LAYOUTMAP_CORE_OPTIMIZERS_SGD_H_
#define TF_LAYOUTMAP_CORE_OPTIMIZERS_SGD_H_

#include "cc/core/simd/vector.h"

namespace layoutmap {
namespace LM_ISA {

struct Sgd {
  static constexpr int kNumSlots = 0;

  explicit Sgd(const float* hyperparameters) : lr(hyperparameters[0]) {}

  template <typename V>
  void operator()(V g, V* p, V* /*slots*/) const {
    *p -= lr * g;
  }

  float lr;
};

}  // namespace LM_ISA
}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_OPTIMIZERS_SGD_H_
