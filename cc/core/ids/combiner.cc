#include "cc/core/ids/combiner.h"

#include <cassert>
#include <cmath>
#include <cstdint>
#include <string>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"

namespace layoutmap {

Status ParseCombiner(const std::string& name, Combiner* combiner) {
  if (name == "sum") {
    *combiner = Combiner::kSum;
  } else if (name == "mean") {
    *combiner = Combiner::kMean;
  } else if (name == "sqrtn") {
    *combiner = Combiner::kSqrtn;
  } else {
    return InvalidArgument(
        "`combiner` must be one of sum, mean, sqrtn. Received: " + name);
  }
  return Status();
}

void CombineGains(Combiner combiner, Span<const int64_t> splits,
                  Span<const float> weights, Span<float> gains) {
  assert(weights.empty() || weights.size() == gains.size());
  auto weight = [&](int64_t i) { return weights.empty() ? 1.0f : weights[i]; };
  for (int64_t s = 0; s + 1 < splits.size(); ++s) {
    double divisor = 0;
    for (int64_t i = splits[s]; i < splits[s + 1]; ++i) {
      const double w = weight(i);
      divisor += combiner == Combiner::kSqrtn ? w * w : w;
    }
    if (combiner == Combiner::kSum) divisor = 1;
    if (combiner == Combiner::kSqrtn) divisor = std::sqrt(divisor);
    for (int64_t i = splits[s]; i < splits[s + 1]; ++i) {
      gains[i] = divisor == 0 ? 0.0f : static_cast<float>(weight(i) / divisor);
    }
  }
}

void CombineOutputGains(Combiner combiner, Span<const int64_t> splits,
                        Span<float> gains) {
  for (int64_t o = 0; o + 1 < splits.size(); ++o) {
    const double num_ids = static_cast<double>(splits[o + 1] - splits[o]);
    const double divisor = combiner == Combiner::kSum     ? 1
                           : combiner == Combiner::kSqrtn ? std::sqrt(num_ids)
                                                          : num_ids;
    gains[o] = divisor == 0 ? 0.0f : static_cast<float>(1 / divisor);
  }
}

}  // namespace layoutmap
