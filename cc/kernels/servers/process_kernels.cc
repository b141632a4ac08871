// Kernels that describe a process of a cluster, and store its coordinator.

#include <cstdlib>
#include <mutex>

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

// Stores a text in the process. The contexts of different coordinators have
// separate resources in a process, so the text is a variable of the process.
class ClaimProcessOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(tensorflow::OpKernelContext* ctx) override {
    tensorflow::tstring expected, claim;
    OP_REQUIRES_OK(ctx, GetScalar(ctx, "expected", &expected));
    OP_REQUIRES_OK(ctx, GetScalar(ctx, "claim", &claim));
    static std::mutex mutex;
    static auto* stored = new tensorflow::tstring();
    tensorflow::tstring found;
    {
      std::lock_guard<std::mutex> lock(mutex);
      found = *stored;
      if (found == expected) *stored = claim;
    }
    OP_REQUIRES_OK(ctx, SetScalar(ctx, "found", found));
  }
};

LM_REGISTER_KERNEL("ClaimProcess", ClaimProcessOp);

}  // namespace
}  // namespace layoutmap
