// A kernel that describes a process of a cluster.

#include <cstdlib>

#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/platform/tstring.h"

namespace layoutmap {
namespace {

class DescribeProcessOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(tensorflow::OpKernelContext* ctx) override {
    // tf_layoutmap/_core/ops.py sets this environment variable after it has
    // loaded the library.
    const char* found = std::getenv("TF_LAYOUTMAP_PROCESS");
    OP_REQUIRES_OK(
        ctx, SetScalar(ctx, "description",
                       tensorflow::tstring(found == nullptr ? "{}" : found)));
  }
};

LM_REGISTER_KERNEL("DescribeProcess", DescribeProcessOp);

}  // namespace
}  // namespace layoutmap
