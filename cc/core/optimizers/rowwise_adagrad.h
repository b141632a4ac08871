// Adagrad with one accumulator per row, as in DLRM's RWSAdagrad and FBGEMM's
// EXACT_ROWWISE_ADAGRAD (Mudigere et al., arXiv 2104.05158):
//
//   a += mean over the columns of g^2
//   p -= lr / (sqrt(a) + epsilon) g

#ifndef TF_LAYOUTMAP_CORE_OPTIMIZERS_ROWWISE_ADAGRAD_H_
#define TF_LAYOUTMAP_CORE_OPTIMIZERS_ROWWISE_ADAGRAD_H_

#include "cc/core/simd/columns.h"

namespace layoutmap {
namespace LM_ISA {

struct RowwiseAdagrad {
  static constexpr int kNumSlots = 1;
  static constexpr bool kIsPerRow[] = {true};  // Accumulators.

  explicit RowwiseAdagrad(const float* h) : lr(h[0]), epsilon(h[1]) {}

  void operator()(int64_t dim, float* g, float* p, float* const* slots) const {
    float* a = slots[0];
    const float squares = SumColumns(dim, [=](int64_t c, auto x) {
      Read(g + c, &x);
      return x * x;
    });
    *a += squares / static_cast<float>(dim);
    const float scale = lr / (Sqrt(*a) + epsilon);
    ForColumns(dim, [=](int64_t c, auto x) {
      auto row = x;
      Read(g + c, &x);
      Read(p + c, &row);
      Write(p + c, row - scale * x);
    });
  }

  float lr;
  float epsilon;
};

}  // namespace LM_ISA
}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_OPTIMIZERS_ROWWISE_ADAGRAD_H_
