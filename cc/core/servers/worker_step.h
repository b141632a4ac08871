// The worker side of a step. It determines the rows to request from each
// server, looks up the batch in these rows, and computes the gradients to send
// back. It keeps no state between steps.

#ifndef TF_LAYOUTMAP_CORE_SERVERS_WORKER_STEP_H_
#define TF_LAYOUTMAP_CORE_SERVERS_WORKER_STEP_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/servers/messages.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"

namespace layoutmap {

// The tables and features of a host engine with one replica, and the servers of
// the shards.
struct ServersConfig {
  EngineConfig engine;
  int32_t num_servers = 1;
  // By table, then by shard.
  std::vector<int32_t> server_of_shard;
  RowType wire = RowType::kFloat32;  // type of rows and gradients in messages
};

// Returns an error unless all shards consist of contiguous rows and are on a
// valid server.
Status CheckServersConfig(const ServersConfig& config);

// Allocates memory for the message to a server, aligned to 8 bytes.
using Allocate =
    std::function<Status(int32_t server, int64_t size, uint8_t** bytes)>;

// The layout of fetched messages, if they contain more than the rows of a
// batch.
struct FetchedLayout {
  // Offset of the values, by server. Empty: kFetchedHeader for each server.
  std::vector<int64_t> headers;
  // By table, then by shard: a last row that is always sent, or negative if
  // there is none. Empty: no shard has such a row.
  std::vector<int64_t> last_rows;
};

// One batch. Immutable after its creation.
class WorkerStep {
 public:
  // Finds the unique rows of a checked batch, by table.
  static std::shared_ptr<const WorkerStep> Make(
      std::shared_ptr<const ServersConfig> config,
      std::shared_ptr<const Batch> batch, const ParallelFor& parallel_for,
      FetchedLayout layout = {});

  const ServersConfig& config() const { return *config_; }
  const Batch& batch() const { return *batch_; }

  // Returns, for each server, the number of rows that the batch needs from each
  // of its shards, followed by all of these rows.
  std::vector<std::vector<uint32_t>> RowsByServer() const;

  // Writes the requests for the rows that the batch needs, one per server.
  Status Request(const Allocate& allocate) const;

  // Looks up the batch in the responses of the servers. Writes one matrix
  // [num_outputs, dim] per feature. Returns an error if the responses do not
  // match the requests.
  Status LookUp(const std::vector<Span<const uint8_t>>& fetched,
                const RowKernels& kernels, const ParallelFor& parallel_for,
                const std::vector<float*>& activations) const;

  // Sums the gradients of each unique row in the order of the host engine, and
  // writes the update for each server. `fetched` contains the responses of the
  // servers.
  Status Fold(const BatchGradients& gradients,
              const std::vector<Span<const uint8_t>>& fetched,
              const ClosureToken& token, const RowKernels& kernels,
              const ParallelFor& parallel_for, const Allocate& allocate) const;

 private:
  // A shard and its unique rows, [first, last) of its table.
  struct Part {
    size_t table;
    int32_t server;
    int64_t first_row;
    int64_t first;
    int64_t last;
    int64_t num_unused;  // additional rows that are sent after these
  };

  WorkerStep() = default;

  int64_t HeaderOf(int32_t server) const {
    return layout_.headers.empty() ? kFetchedHeader : layout_.headers[server];
  }

  Status CheckFetched(const std::vector<Span<const uint8_t>>& fetched) const;
  template <typename T>
  Status LookUpAs(const std::vector<Span<const uint8_t>>& fetched,
                  const RowKernels& kernels, const ParallelFor& parallel_for,
                  const std::vector<float*>& activations) const;
  // The number of rows that an update sends for each part, and the rows by
  // server. If `is_single` is true for a table, each contribution sends its
  // row.
  struct Sent {
    std::vector<std::vector<uint32_t>> counts;
    std::vector<std::vector<uint8_t>> rows;
  };
  Sent RowsToSend(const std::vector<bool>& is_single) const;
  void RankRows(size_t table, const std::vector<uint32_t>& positions);

  std::shared_ptr<const ServersConfig> config_;
  std::shared_ptr<const Batch> batch_;
  FetchedLayout layout_;
  std::vector<TableStep> tables_;
  std::vector<Part> parts_;  // by table, then by shard
  // By feature: the index in the unique rows for each id.
  std::vector<std::vector<uint32_t>> ranks_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVERS_WORKER_STEP_H_
