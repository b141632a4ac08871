// Views of memory that another object owns.

#ifndef TF_LAYOUTMAP_CORE_BASE_VIEWS_H_
#define TF_LAYOUTMAP_CORE_BASE_VIEWS_H_

#include <cassert>
#include <cstdint>
#include <vector>

namespace layoutmap {

template <typename T>
class Span {
 public:
  Span() = default;
  Span(T* data, int64_t size) : data_(data), size_(size) {}
  // The view becomes invalid if the vector reallocates its memory.
  template <typename U>
  Span(std::vector<U>& v)  // NOLINT: views convert
      : data_(v.data()), size_(static_cast<int64_t>(v.size())) {}
  template <typename U>
  Span(const std::vector<U>& v)  // NOLINT: views convert
      : data_(v.data()), size_(static_cast<int64_t>(v.size())) {}

  operator Span<const T>() const { return {data_, size_}; }  // NOLINT

  T* data() const { return data_; }
  int64_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* begin() const { return data_; }
  T* end() const { return data_ + size_; }
  T& operator[](int64_t i) const {
    assert(i >= 0 && i < size_);
    return data_[i];
  }

 private:
  T* data_ = nullptr;
  int64_t size_ = 0;
};

// A view of rows that have equal lengths and are stored contiguously.
template <typename T>
struct MatrixView {
  T* data = nullptr;
  int64_t num_rows = 0;
  int64_t dim = 0;

  T* row(int64_t r) const {
    assert(r >= 0 && r < num_rows);
    return data + r * dim;
  }
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_BASE_VIEWS_H_
