// The inputs of an op that hold the ids of a batch.

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

// The inputs `ids`, `splits`, `num_samples` and `weights`, one for each
// feature.
template <typename Tid>
absl::Status ReadFeatureInputs(tensorflow::OpKernelContext* ctx,
                               std::vector<FeatureInput<Tid>>* features);

// Of an op with the inputs `ids`, `splits`, `num_samples` and `weights`, and
// the attrs `Tids`, `packed` and `mark`.
class BatchInputs {
 public:
  absl::Status Read(tensorflow::OpKernelConstruction* ctx);

  // The batch, or in `made` what the engine finds wrong with it. What is wrong
  // with the tensors is returned.
  template <typename Tid>
  absl::Status MakeBatch(tensorflow::OpKernelContext* ctx,
                         const HostEngine& engine,
                         std::shared_ptr<const Batch>* batch,
                         Status* made) const;

 private:
  bool is_packed_ = false;
  int64_t mark_ = 0;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_ENGINE_BATCH_INPUTS_H_
