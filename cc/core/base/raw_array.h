// Memory for values that are all written before they are read.

#ifndef TF_LAYOUTMAP_CORE_BASE_RAW_ARRAY_H_
#define TF_LAYOUTMAP_CORE_BASE_RAW_ARRAY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "cc/core/base/views.h"

namespace layoutmap {

// A vector would clear it first, in one thread: for a step of 100,000 keys that
// takes as long as to find them. What is never written to is never fetched from
// the system, so that room for the worst case costs little.
template <typename T>
class RawArray {
 public:
  static_assert(std::is_trivially_default_constructible<T>::value &&
                    std::is_trivially_destructible<T>::value,
                "nothing is constructed here");

  RawArray() = default;
  explicit RawArray(int64_t size)
      : values_(new T[static_cast<size_t>(size)]), size_(size) {}

  T* data() const { return values_.get(); }
  int64_t size() const { return size_; }
  T& operator[](int64_t i) const { return values_[static_cast<size_t>(i)]; }
  operator Span<T>() const { return {data(), size_}; }  // NOLINT: views convert

 private:
  std::unique_ptr<T[]> values_;
  int64_t size_ = 0;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_BASE_RAW_ARRAY_H_
