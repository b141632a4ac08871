// What the owners of shards are told of a batch, and of its gradients.
//
// Under a strategy of several processes each table is divided among them. An
// update sums what all replicas contribute to a row, in the order feature,
// replica, sample, position. So a contribution travels as it is: an owner gets
// the part of each feature that looks into its shards, as ragged ids with a
// gain each, and later one gradient for each of their outputs.
//
//   words   for each feature: number of outputs, number of ids, flags
//           for each feature: ids of each output, unless it is 1 each
//                             rows, numbered in the shard
//                             gains, as bits, unless they are 1 each
//   floats  for each feature: the gradient of each output

#ifndef TF_LAYOUTMAP_CORE_EXCHANGE_CONTRIBUTIONS_H_
#define TF_LAYOUTMAP_CORE_EXCHANGE_CONTRIBUTIONS_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/servers/worker_step.h"
#include "cc/core/steps/step.h"

namespace layoutmap {

// The part of one feature that looks into the shards of one owner.
struct OwnedPart {
  std::vector<uint32_t> outputs;  // output rows that have an id there
  std::vector<uint32_t> counts;   // how many ids each of them has there
  std::vector<uint32_t> rows;     // in the shard, sample by sample
  std::vector<float> gains;       // empty: 1 each
};

// By owner, then by feature. The config's servers are the owners.
using OwnedParts = std::vector<std::vector<OwnedPart>>;

OwnedParts SplitBatch(const WorkerStep& step, const ParallelFor& parallel_for);

// The words for one owner.
std::vector<uint32_t> WriteParts(const std::vector<OwnedPart>& parts);

// What `WriteParts` has written, but for `outputs`. Refused if it is too short
// or too long.
Status ReadParts(Span<const uint32_t> words, int64_t num_features,
                 std::vector<OwnedPart>* parts);

// Floats for each owner. Refused if gradients are not shaped like the
// activations of the step's batch.
Status SplitGradients(const WorkerStep& step, const BatchGradients& gradients,
                      const ParallelFor& parallel_for,
                      std::vector<std::vector<float>>* values);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_EXCHANGE_CONTRIBUTIONS_H_
