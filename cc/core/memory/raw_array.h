// An array that does not initialize its values.

#ifndef TF_LAYOUTMAP_CORE_MEMORY_RAW_ARRAY_H_
#define TF_LAYOUTMAP_CORE_MEMORY_RAW_ARRAY_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "cc/core/base/views.h"
#include "cc/core/memory/kept_memory.h"

namespace layoutmap {

// An array whose values must be written before they are read. A std::vector
// would initialize its values in one thread. In a step with 100,000 keys, this
// initialization takes as long as finding the keys. Memory that is never
// written takes no physical pages, so an array can have the size of the worst
// case. The memory of large arrays is kept for the next step (kept_memory.h).
template <typename T>
class RawArray {
 public:
  static_assert(std::is_trivially_default_constructible<T>::value &&
                    std::is_trivially_destructible<T>::value,
                "values are not constructed or destroyed");

  RawArray() = default;
  explicit RawArray(int64_t size)
      : values_(
            static_cast<T*>(TakeMemory(static_cast<size_t>(size) * sizeof(T)))),
        size_(size) {}
  RawArray(RawArray&& other) noexcept { Swap(other); }
  RawArray& operator=(RawArray&& other) noexcept {
    RawArray(std::move(other)).Swap(*this);
    return *this;
  }
  ~RawArray() { ReturnMemory(values_, static_cast<size_t>(size_) * sizeof(T)); }

  T* data() const { return values_; }
  int64_t size() const { return size_; }
  T& operator[](int64_t i) const { return values_[static_cast<size_t>(i)]; }
  operator Span<T>() const { return {data(), size_}; }  // NOLINT: views convert

 private:
  void Swap(RawArray& other) noexcept {
    std::swap(values_, other.values_);
    std::swap(size_, other.size_);
  }

  T* values_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_MEMORY_RAW_ARRAY_H_
