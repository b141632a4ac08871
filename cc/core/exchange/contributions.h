// The contributions of a batch that are sent to the owners of table shards.
//
// Under a strategy with several processes, the rows of each table are
// partitioned over the processes. An update sums the contributions of all
// replicas to a row in the order feature, replica, sample, position.
// Contributions are therefore sent unsummed: for each feature, an owner
// receives the part that accesses its shards, as ragged ids with one gain per
// id, and later one gradient for each of the outputs of that part.
//
//   words   for each feature: number of outputs, number of ids, flags
//           for each feature: number of ids of each output, omitted if all 1
//                             rows, relative to the shard
//                             gains as bits, omitted if all 1
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

// The part of one feature that accesses the shards of one owner.
struct OwnedPart {
  std::vector<uint32_t> outputs;  // output rows that have an id in these shards
  std::vector<uint32_t> counts;   // number of these ids for each output row
  std::vector<uint32_t> rows;     // relative to the shard, ordered by sample
  std::vector<float> gains;       // empty: all gains are 1
};

// Parts indexed by owner, then by feature. The owners are the servers of the
// configuration.
using OwnedParts = std::vector<std::vector<OwnedPart>>;

OwnedParts SplitBatch(const WorkerStep& step, const ParallelFor& parallel_for);

// Returns the encoded parts for one owner.
std::vector<uint32_t> WriteParts(const std::vector<OwnedPart>& parts);

// Decodes the result of `WriteParts`, except for `outputs`. Returns an error if
// `words` is too short or too long.
Status ReadParts(Span<const uint32_t> words, int64_t num_features,
                 std::vector<OwnedPart>* parts);

// Computes the gradients to send to each owner. Returns an error if the shapes
// of `gradients` do not match the activations of the step's batch.
Status SplitGradients(const WorkerStep& step, const BatchGradients& gradients,
                      const ParallelFor& parallel_for,
                      std::vector<std::vector<float>>* values);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_EXCHANGE_CONTRIBUTIONS_H_
