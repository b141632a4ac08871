// Parameters for the simulation of a quantized table. The rows are stored as
// floats.

#ifndef TF_LAYOUTMAP_CORE_TABLES_QUANTIZATION_H_
#define TF_LAYOUTMAP_CORE_TABLES_QUANTIZATION_H_

#include <cstdint>
#include <string>

#include "cc/core/base/status.h"
#include "cc/core/simd/row_kernels.h"

namespace layoutmap {

// Computes the parameters for `num_buckets` equally spaced values. The first
// value is `lower`, and the last value is `upper`. `table` is the table name in
// error messages.
Status MakeQuantization(float lower, float upper, int64_t num_buckets,
                        const std::string& table, Quantization* quantization);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_TABLES_QUANTIZATION_H_
