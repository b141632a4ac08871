// Reads the inputs of an op that contain a batch of ids.

#ifndef TF_LAYOUTMAP_KERNELS_ENGINE_BATCH_INPUTS_H_
#define TF_LAYOUTMAP_KERNELS_ENGINE_BATCH_INPUTS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "cc/core/base/status.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/steps/step.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace layoutmap {

// Reads the inputs `ids`, `splits`, `num_samples` and `weights` of each
// feature.
template <typename Tid>
absl::Status ReadFeatureInputs(tensorflow::OpKernelContext* ctx,
                               std::vector<FeatureInput<Tid>>* features);

// Reads the batch of an op. The op must have the inputs `ids`, `splits`,
// `num_samples` and `weights`, and the attributes `Tids`, `packed` and `mark`.
class BatchInputs {
 public:
  absl::Status Read(tensorflow::OpKernelConstruction* ctx);

  // Creates the batch. Returns an error if the tensors are malformed. If the
  // engine detects an error in the ids, `made` is set to this error. If
  // `lookup_only` is true, the batch may refer to the tensors instead of
  // copying their values, and it must not be used for training.
  template <typename Tid>
  absl::Status MakeBatch(tensorflow::OpKernelContext* ctx,
                         const HostEngine& engine,
                         std::shared_ptr<const Batch>* batch, Status* made,
                         bool lookup_only = false) const;

 private:
  bool is_packed_ = false;
  int64_t mark_ = 0;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_ENGINE_BATCH_INPUTS_H_
