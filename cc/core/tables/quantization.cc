#include "cc/core/tables/quantization.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "cc/core/base/status.h"
#include "cc/core/simd/row_kernels.h"

namespace layoutmap {
namespace {

// From here on a float does not hold the number of each bucket.
constexpr int64_t kMaxNumBuckets = int64_t{1} << 23;

}  // namespace

Status MakeQuantization(float lower, float upper, int64_t num_buckets,
                        const std::string& table, Quantization* quantization) {
  const std::string where = "Table '" + table + "': ";
  if (num_buckets < 2 || num_buckets > kMaxNumBuckets) {
    return InvalidArgument(where + "num_buckets must be in [2, " +
                           std::to_string(kMaxNumBuckets) +
                           "]. Received: " + std::to_string(num_buckets));
  }
  const float quantum = (upper - lower) / static_cast<float>(num_buckets - 1);
  if (!std::isfinite(lower) || !std::isfinite(upper) ||
      // Threads that compute with zero instead of subnormal numbers would
      // divide by it.
      !(quantum >= std::numeric_limits<float>::min()) ||
      !std::isfinite(quantum)) {
    return InvalidArgument(
        where +
        "the limits of its quantization must be finite and lower below upper "
        "by more than a float can round away. Received: " +
        std::to_string(lower) + " and " + std::to_string(upper));
  }
  *quantization = {lower, upper, quantum};
  return Status();
}

}  // namespace layoutmap
