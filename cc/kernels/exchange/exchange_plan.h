// Attributes and outputs of the ops that plan a step whose tables are sharded
// over processes.

#ifndef TF_LAYOUTMAP_KERNELS_EXCHANGE_EXCHANGE_PLAN_H_
#define TF_LAYOUTMAP_KERNELS_EXCHANGE_EXCHANGE_PLAN_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "cc/core/servers/worker_step.h"
#include "cc/core/steps/step.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace layoutmap {

// Sets an element of an output list to a vector.
template <typename T, typename U>
absl::Status SetOutput(tensorflow::OpOutputList* outputs, size_t i,
                       const std::vector<U>& values) {
  tensorflow::Tensor* output = nullptr;
  TF_RETURN_IF_ERROR(outputs->allocate(
      static_cast<int>(i),
      tensorflow::TensorShape({static_cast<int64_t>(values.size())}), &output));
  std::copy(values.begin(), values.end(), output->flat<T>().data());
  return absl::OkStatus();
}

// Reads the tables, the features and the owner of each shard.
absl::Status ReadExchangeConfig(tensorflow::OpKernelConstruction* ctx,
                                ServersConfig* config);

// Sets the outputs `plan`, `requests`, `contributions`, `sizes` and `error`.
// `batch` is the checked batch. If `error` is not OK, the other outputs are
// empty, and `batch` is not used. `has_contributions` is whether the owners
// receive the ids of the batch.
absl::Status OutputExchangePlan(tensorflow::OpKernelContext* ctx,
                                std::shared_ptr<const ServersConfig> config,
                                std::shared_ptr<const Batch> batch,
                                bool has_contributions,
                                const absl::Status& error);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_EXCHANGE_EXCHANGE_PLAN_H_
