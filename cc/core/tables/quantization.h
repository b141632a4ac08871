// Rows as a quantized table would give them, though they are kept as floats.

#ifndef TF_LAYOUTMAP_CORE_TABLES_QUANTIZATION_H_
#define TF_LAYOUTMAP_CORE_TABLES_QUANTIZATION_H_

#include <cstdint>
#include <string>

#include "cc/core/base/status.h"
#include "cc/core/simd/row_kernels.h"

namespace layoutmap {

// `num_buckets` values from `lower` to `upper`, both included, equally far
// apart. `table` is for the message.
Status MakeQuantization(float lower, float upper, int64_t num_buckets,
                        const std::string& table, Quantization* quantization);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_TABLES_QUANTIZATION_H_
