// A variant tensor that contains the step of a worker, and functions that read
// this tensor and the gradients of the step. Ops on the same device pass the
// tensor to each other.

#ifndef TF_LAYOUTMAP_KERNELS_SERVERS_PLAN_TENSOR_H_
#define TF_LAYOUTMAP_KERNELS_SERVERS_PLAN_TENSOR_H_

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/servers/worker_step.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"
#include "cc/kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_tensor_data.h"

namespace layoutmap {

// A variant value that contains a step. In contrast to a resource, a variant
// value is deleted with the last tensor that contains it.
struct PlanTensor {
  std::shared_ptr<const WorkerStep> step;

  static std::string TypeName() { return "LayoutMap>WorkerStep"; }
  std::string DebugString() const { return TypeName(); }
  // A plan cannot be encoded, because it is never sent to another process.
  void Encode(tensorflow::VariantTensorData* data) const {}
  bool Decode(const tensorflow::VariantTensorData& data) { return false; }
};

// Gets the step from the input `plan`.
inline absl::Status GetPlan(tensorflow::OpKernelContext* ctx,
                            std::shared_ptr<const WorkerStep>* step) {
  const tensorflow::Tensor* tensor;
  TF_RETURN_IF_ERROR(GetInput(ctx, "plan", 0, &tensor));
  const auto* plan = tensor->scalar<tensorflow::Variant>()().get<PlanTensor>();
  if (plan == nullptr || plan->step == nullptr) {
    return absl::InvalidArgumentError(
        "`plan` must be an output of `PlanStep` in the same process");
  }
  *step = plan->step;
  return absl::OkStatus();
}

inline absl::Status CheckCount(const char* name, size_t expected,
                               size_t received) {
  if (expected == received) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "`", name, "` must be ", expected, ". Received: ", received));
}

// Reads the input list `gradients`, which has one tensor for each feature.
inline absl::Status GetFeatureGradients(tensorflow::OpKernelContext* ctx,
                                        const EngineConfig& config,
                                        BatchGradients* gradients) {
  tensorflow::OpInputList features;
  TF_RETURN_IF_ERROR(ctx->input_list("gradients", &features));
  TF_RETURN_IF_ERROR(
      CheckCount("num_features", config.features.size(), features.size()));
  for (const tensorflow::Tensor& one : features) {
    gradients->features.push_back(View<float>(one));
  }
  return absl::OkStatus();
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_SERVERS_PLAN_TENSOR_H_
