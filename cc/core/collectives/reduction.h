// The arithmetic of an all-reduce between devices that share memory.

#ifndef TF_LAYOUTMAP_CORE_COLLECTIVES_REDUCTION_H_
#define TF_LAYOUTMAP_CORE_COLLECTIVES_REDUCTION_H_

#include <cstdint>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/views.h"

namespace layoutmap {

enum class ElementType { kFloat, kDouble, kHalf, kBfloat16, kInt32, kInt64 };
enum class MergeOp { kAdd, kMul, kMax, kMin };
enum class FinalOp { kIdentity, kDivide };

struct Reduction {
  ElementType type;
  MergeOp merge;
  // kDivide divides each element by the number of devices. Integers are rounded
  // towards 0.
  FinalOp final;
};

int64_t BytesPerElement(ElementType type);

// Reduces the inputs of all devices, element by element.
//
// The order of the operands is the order of TensorFlow's ring, so the results
// are bitwise identical to TensorFlow's results. The elements are divided into
// one chunk of `chunk_elements` per device; the last chunks may be shorter. The
// chunk c starts with the input of device c, and the inputs of the devices
// c + 1, c + 2, ... (modulo the number of devices) are merged into it. 16-bit
// values are rounded after each operation. NaN is propagated.
//
// `inputs` has one array of `num_elements` elements per device. `output` may be
// one of the inputs. The results do not depend on the number of threads.
void Reduce(const Reduction& reduction, Span<const void* const> inputs,
            int64_t num_elements, int64_t chunk_elements,
            const ParallelFor& parallel_for, void* output);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_COLLECTIVES_REDUCTION_H_
