// Computes the contributions of a batch that a process sends to the owners of
// table shards.
//
// Under a strategy with several processes, the rows of each table are
// partitioned over the processes. An update sums the contributions of all
// replicas to a row in the order feature, replica, sample, position. A process
// therefore sends its contributions without summing them. For each feature, an
// owner receives the ids of its shards as ragged ids with one gain per id.
// After the backward pass, the owner receives one gradient for each output that
// uses these ids.
//
// The ids are encoded as `words`, in this order:
//
//   * Three words for each feature: the number of outputs, the number of ids,
//     and flags.
//   * For each feature, the number of ids of each output (omitted if all
//     numbers are 1), the rows relative to their shards, and the bits of the
//     gains (omitted if all gains are 1).
//
// The gradients are encoded as floats: for each feature, the gradient of each
// output.

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

// The ids of one feature that are in the shards of one owner.
struct OwnedPart {
  // Output rows that have at least one id in the shards.
  std::vector<uint32_t> outputs;
  // Number of ids in the shards for each of these output rows.
  std::vector<uint32_t> counts;
  // Row of each id, relative to its shard. The ids are ordered by output row.
  std::vector<uint32_t> rows;
  // Gain of each id. If empty, all gains are 1.
  std::vector<float> gains;
};

// Parts that are indexed by owner, then by feature. The owners are the servers
// in the ServersConfig.
using OwnedParts = std::vector<std::vector<OwnedPart>>;

OwnedParts SplitBatch(const WorkerStep& step, const ParallelFor& parallel_for);

// Encodes the parts of one owner as the `words` described above.
std::vector<uint32_t> WriteParts(const std::vector<OwnedPart>& parts);

// Decodes the result of `WriteParts`. The words do not contain `outputs`.
// Returns an error if `words` is too short or too long.
Status ReadParts(Span<const uint32_t> words, int64_t num_features,
                 std::vector<OwnedPart>* parts);

// Computes the gradients that the process sends to each owner. Returns an error
// if the shapes of `gradients` do not match the activations of the step's
// batch.
Status SplitGradients(const WorkerStep& step, const BatchGradients& gradients,
                      const ParallelFor& parallel_for,
                      std::vector<std::vector<float>>* values);

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_EXCHANGE_CONTRIBUTIONS_H_
