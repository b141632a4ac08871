// An input of a kernel that contains a message between a worker and a server.

#ifndef TF_LAYOUTMAP_KERNELS_SERVERS_ALIGNED_BYTES_H_
#define TF_LAYOUTMAP_KERNELS_SERVERS_ALIGNED_BYTES_H_

#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "cc/core/base/views.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace layoutmap {

// The bytes of a message, aligned to 8 bytes, so that the code can read values
// of 8 bytes. Messages from another process are already aligned. If the input
// is a slice of a tensor that is not aligned, this class copies the bytes.
class AlignedBytes {
 public:
  absl::Status Get(tensorflow::OpKernelContext* ctx, const char* name) {
    const tensorflow::Tensor* tensor;
    TF_RETURN_IF_ERROR(GetInput(ctx, name, 1, &tensor));
    Set(*tensor);
    return absl::OkStatus();
  }

  void Set(const tensorflow::Tensor& tensor) {
    bytes_ = View<uint8_t>(tensor);
    if (reinterpret_cast<uintptr_t>(bytes_.data()) % sizeof(uint64_t) == 0) {
      return;
    }
    copy_.resize(bytes_.size() / sizeof(uint64_t) + 1);
    auto* const to = reinterpret_cast<uint8_t*>(copy_.data());
    std::memcpy(to, bytes_.data(), bytes_.size());
    bytes_ = {to, bytes_.size()};
  }

  Span<const uint8_t> bytes() const { return bytes_; }

 private:
  Span<const uint8_t> bytes_;
  std::vector<uint64_t> copy_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_SERVERS_ALIGNED_BYTES_H_
