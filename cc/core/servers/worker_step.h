// The worker side of a step. The worker determines the rows that it requests
// from each server, looks up the batch in these rows, and computes the
// gradients that it sends back. The worker keeps no state between steps.

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

// The tables and features of a host engine with one replica, and the server of
// each shard.
struct ServersConfig {
  EngineConfig engine;
  int32_t num_servers = 1;
  // The server of each shard, ordered by table, then by shard.
  std::vector<int32_t> server_of_shard;
  // The type of rows and gradients in messages.
  RowType wire = RowType::kFloat32;
};

// Returns an error if a shard does not consist of contiguous rows, or if the
// server of a shard is not valid.
Status CheckServersConfig(const ServersConfig& config);

// Function that allocates memory for the message to a server. The memory must
// be aligned to 8 bytes.
using Allocate =
    std::function<Status(int32_t server, int64_t size, uint8_t** bytes)>;

// The layout of `fetched` messages, which differs from the default if the
// messages contain more than the rows of a batch.
struct FetchedLayout {
  // Offset of the row values in the message of each server. If empty, all
  // offsets are kFetchedHeader.
  std::vector<int64_t> headers;
  // For each shard, ordered by table: the last row of the shard if the server
  // always sends this row, or a negative number. If empty, the server sends no
  // such row for any shard.
  std::vector<int64_t> last_rows;
};

// The step of one batch. The object is immutable.
class WorkerStep {
 public:
  // Finds the unique rows of each table in a checked batch.
  static std::shared_ptr<const WorkerStep> Make(
      std::shared_ptr<const ServersConfig> config,
      std::shared_ptr<const Batch> batch, const ParallelFor& parallel_for,
      FetchedLayout layout = {});

  const ServersConfig& config() const { return *config_; }
  const Batch& batch() const { return *batch_; }

  // Returns one list per server. The list contains the number of rows that the
  // batch needs from each shard of the server, followed by the rows of all
  // shards.
  std::vector<std::vector<uint32_t>> RowsByServer() const;

  // Writes one request per server for the rows that the batch needs.
  Status Request(const Allocate& allocate) const;

  // Looks up the batch in the responses of the servers. Writes one matrix
  // [num_outputs, dim] per feature. Returns an error if the responses do not
  // match the requests.
  Status LookUp(const std::vector<Span<const uint8_t>>& fetched,
                const RowKernels& kernels, const ParallelFor& parallel_for,
                const std::vector<float*>& activations) const;

  // Sums the gradients of each unique row in the same order as the host engine,
  // and writes one update per server. `fetched` contains the responses of the
  // servers, or the first `kFetchedHeader` bytes of each response. If `fetched`
  // is empty, the number of updates before the step is unknown.
  Status Fold(const BatchGradients& gradients,
              const std::vector<Span<const uint8_t>>& fetched,
              const ClosureToken& token, const RowKernels& kernels,
              const ParallelFor& parallel_for, const Allocate& allocate) const;

 private:
  // A shard and its unique rows. The unique rows have the indices [first, last)
  // in their table.
  struct Part {
    size_t table;
    int32_t server;
    int64_t first_row;
    int64_t first;
    int64_t last;
    // Number of additional rows that the server sends after the rows of the
    // batch.
    int64_t num_unused;
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
  // The rows that an update sends. `counts` is the number of rows of each part,
  // and `rows` contains the encoded rows for each server. If `is_single` is
  // true for a table, the worker sends one row per contribution.
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
  // The parts, ordered by table, then by shard.
  std::vector<Part> parts_;
  // For each feature, the index of each id's row in the unique rows of the
  // table.
  std::vector<std::vector<uint32_t>> ranks_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVERS_WORKER_STEP_H_
