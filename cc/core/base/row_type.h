// The data types in which table rows can be stored, and how ids are stored.

#ifndef TF_LAYOUTMAP_CORE_BASE_ROW_TYPE_H_
#define TF_LAYOUTMAP_CORE_BASE_ROW_TYPE_H_

#include <cstdint>

namespace layoutmap {

enum class RowType { kFloat32, kBfloat16, kFloat16 };

enum class IdType { kUint32, kInt32, kInt64 };

// The ids of outputs that all have the same number of ids. Output o has the ids
// with the indices [first + o * stride, first + o * stride + size).
struct EvenIds {
  int64_t first = 0;
  int64_t stride = 0;
  int64_t size = 0;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_BASE_ROW_TYPE_H_
