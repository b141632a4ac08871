// A view of row ids with one of several integer types.

#ifndef TF_LAYOUTMAP_CORE_BASE_ROW_IDS_H_
#define TF_LAYOUTMAP_CORE_BASE_ROW_IDS_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/row_type.h"
#include "cc/core/base/views.h"

namespace layoutmap {

// The object does not own the ids.
class RowIds {
 public:
  RowIds() = default;
  RowIds(Span<const uint32_t> ids)  // NOLINT: views convert
      : RowIds(IdType::kUint32, ids) {}
  RowIds(Span<const int32_t> ids)  // NOLINT: views convert
      : RowIds(IdType::kInt32, ids) {}
  RowIds(Span<const int64_t> ids)  // NOLINT: views convert
      : RowIds(IdType::kInt64, ids) {}
  RowIds(const std::vector<uint32_t>& ids)  // NOLINT: views convert
      : RowIds(Span<const uint32_t>(ids)) {}

  IdType type() const { return type_; }
  int64_t size() const { return size_; }

  // Calls `work(ids)`, where `ids` is a Span of the type of the ids.
  template <typename Work>
  void With(const Work& work) const {
    switch (type_) {
      case IdType::kUint32:
        return work(As<uint32_t>());
      case IdType::kInt32:
        return work(As<int32_t>());
      case IdType::kInt64:
        return work(As<int64_t>());
    }
  }

 private:
  template <typename T>
  RowIds(IdType type, Span<const T> ids)
      : type_(type), data_(ids.data()), size_(ids.size()) {}

  template <typename T>
  Span<const T> As() const {
    return {static_cast<const T*>(data_), size_};
  }

  IdType type_ = IdType::kUint32;
  const void* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_BASE_ROW_IDS_H_
