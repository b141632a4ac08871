// LAMB (You et al., ICLR 2020, arXiv 1904.00962, algorithm 2). The update
// treats each row as a separate layer, which has its own norms and its own step
// count t:
//
//   t += 1
//   m = beta_1 m + (1 - beta_1) g
//   v = beta_2 v + (1 - beta_2) g^2
//   r = m / (1 - beta_1^t) / (sqrt(v / (1 - beta_2^t)) + epsilon)
//       + weight_decay p
//   p -= lr (|p| / |r|) r
//
// The norms |p| and |r| are Euclidean. If one of the norms is 0, their ratio is
// defined as 1.

#ifndef TF_LAYOUTMAP_CORE_OPTIMIZERS_LAMB_H_
#define TF_LAYOUTMAP_CORE_OPTIMIZERS_LAMB_H_

#include "cc/core/simd/columns.h"

namespace layoutmap {
namespace LM_ISA {

struct Lamb {
  static constexpr int kNumSlots = 3;  // Momenta, velocities, steps.
  static constexpr bool kIsPerRow[] = {false, false, true};

  explicit Lamb(const float* h)
      : lr(h[0]),
        beta_1(h[1]),
        beta_2(h[2]),
        epsilon(h[3]),
        weight_decay(h[4]) {}

  // Returns 1 - beta^t. The computation uses double precision, because a float
  // result near 0 would have few correct digits. It computes the power with
  // multiplications only, so that the result is the same on every machine.
  static double Correction(float beta, float t) {
    double power = 1, square = beta;
    for (uint32_t n = static_cast<uint32_t>(t); n > 0; n >>= 1) {
      if (n & 1) power *= square;
      square *= square;
    }
    return 1 - power;
  }

  // Updates the row `p` and its slot rows. The function overwrites g with r.
  void operator()(int64_t dim, float* g, float* p, float* const* slots) const {
    float* const momenta = slots[0];
    float* const velocities = slots[1];
    float* const t = slots[2];
    *t += 1;
    const float of_m = static_cast<float>(1 / Correction(beta_1, *t));
    const float of_v = static_cast<float>(1 / Correction(beta_2, *t));
    const Lamb& s = *this;
    const float of_r = SumColumns(dim, [&, g, p](int64_t c, auto x) {
      auto m = x, v = x, row = x;
      Read(g + c, &x);
      Read(p + c, &row);
      Read(momenta + c, &m);
      Read(velocities + c, &v);
      m = s.beta_1 * m + (1 - s.beta_1) * x;
      v = s.beta_2 * v + (1 - s.beta_2) * (x * x);
      Write(momenta + c, m);
      Write(velocities + c, v);
      const auto r =
          of_m * m / (Sqrt(of_v * v) + s.epsilon) + s.weight_decay * row;
      Write(g + c, r);
      return r * r;
    });
    const float of_p = SumColumns(dim, [=](int64_t c, auto x) {
      Read(p + c, &x);
      return x * x;
    });
    const float ratio = of_p > 0 && of_r > 0 ? Sqrt(of_p) / Sqrt(of_r) : 1.0f;
    const float scale = lr * ratio;
    ForColumns(dim, [=](int64_t c, auto x) {
      auto row = x;
      Read(g + c, &x);
      Read(p + c, &row);
      Write(p + c, row - scale * x);
    });
  }

  float lr;
  float beta_1;
  float beta_2;
  float epsilon;
  float weight_decay;
};

}  // namespace LM_ISA
}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_OPTIMIZERS_LAMB_H_
