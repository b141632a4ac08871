// The step of a worker as a tensor, which goes from op to op of one device.

#ifndef TF_LAYOUTMAP_KERNELS_SERVERS_PLAN_TENSOR_H_
#define TF_LAYOUTMAP_KERNELS_SERVERS_PLAN_TENSOR_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "cc/core/servers/worker_step.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_tensor_data.h"

namespace layoutmap {

// A value and no resource: it is gone with the last tensor that holds it.
struct PlanTensor {
  std::shared_ptr<const WorkerStep> step;

  static std::string TypeName() { return "LayoutMap>WorkerStep"; }
  std::string DebugString() const { return TypeName(); }
  // It is not to be sent: ids and rows travel, a plan does not.
  void Encode(tensorflow::VariantTensorData* data) const {}
  bool Decode(const tensorflow::VariantTensorData& data) { return false; }
};

// The step that the input `plan` holds.
inline absl::Status GetPlan(tensorflow::OpKernelContext* ctx,
                            std::shared_ptr<const WorkerStep>* step) {
  const tensorflow::Tensor* tensor;
  TF_RETURN_IF_ERROR(GetInput(ctx, "plan", 0, &tensor));
  const auto* plan = tensor->scalar<tensorflow::Variant>()().get<PlanTensor>();
  if (plan == nullptr || plan->step == nullptr) {
    return absl::InvalidArgumentError(
        "`plan` must be what `PlanStep` made, in the same process");
  }
  *step = plan->step;
  return absl::OkStatus();
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_SERVERS_PLAN_TENSOR_H_
