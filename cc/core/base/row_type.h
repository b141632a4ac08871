// The data types in which table rows can be stored, and the types of row ids.

#ifndef TF_LAYOUTMAP_CORE_BASE_ROW_TYPE_H_
#define TF_LAYOUTMAP_CORE_BASE_ROW_TYPE_H_

namespace layoutmap {

enum class RowType { kFloat32, kBfloat16, kFloat16 };

enum class IdType { kUint32, kInt32, kInt64 };

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_BASE_ROW_TYPE_H_
