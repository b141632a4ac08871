#include "cc/core/tables/quantization.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "cc/core/base/status.h"
#include "cc/core/simd/row_kernels.h"

namespace layoutmap {
namespace {

// Maximum number of buckets, for which floats represent all bucket numbers
// exactly.
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
      // A subnormal quantum is rejected, because threads that flush subnormal
      // floats to zero would divide by zero.
      !(quantum >= std::numeric_limits<float>::min()) ||
      !std::isfinite(quantum)) {
    return InvalidArgument(
        where +
        "the limits of its quantization must be finite, and the distance "
        "between "
        "two quantized values must be a normal positive float. Received: " +
        std::to_string(lower) + " and " + std::to_string(upper));
  }
  *quantization = {lower, upper, quantum};
  return Status();
}

}  // namespace layoutmap
