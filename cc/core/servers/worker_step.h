// The worker's half of a step: which rows of which server it needs, what comes
// of them, and which gradients go back. It keeps nothing between steps.

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

// Tables and features, as of a host engine of one replica, and where shards
// are.
struct ServersConfig {
  EngineConfig engine;
  int32_t num_servers = 1;
  // Of all shards of the first table, then those of the second, and so on.
  std::vector<int32_t> server_of_shard;
  RowType wire = RowType::kFloat32;  // how rows and gradients travel
};

// Refuses shards that are not contiguous rows, or on no server.
Status CheckServersConfig(const ServersConfig& config);

// Gives memory for the message to a server, which begins where 8 bytes can be
// written at once.
using Allocate =
    std::function<Status(int32_t server, int64_t size, uint8_t** bytes)>;

// What was fetched, where it is not the rows of a batch and nothing else.
struct FetchedLayout {
  // By server: how far the values are into it. Empty: kFetchedHeader each.
  std::vector<int64_t> headers;
  // By shard, those of all tables one after the other: a last row that comes
  // whether the batch needs it or not; negative if there is none. Empty: none.
  std::vector<int64_t> last_rows;
};

// One batch. Not written to after it is made.
class WorkerStep {
 public:
  // Finds the unique rows of a checked batch, table by table.
  static std::shared_ptr<const WorkerStep> Make(
      std::shared_ptr<const ServersConfig> config,
      std::shared_ptr<const Batch> batch, const ParallelFor& parallel_for,
      FetchedLayout layout = {});

  const ServersConfig& config() const { return *config_; }
  const Batch& batch() const { return *batch_; }

  // What the batch needs of each server: the number of rows of each of its
  // shards, then the rows of all of them.
  std::vector<std::vector<uint32_t>> RowsByServer() const;

  // Writes to each server which rows the batch needs.
  Status Request(const Allocate& allocate) const;

  // Looks the batch up in what the servers sent, into one matrix per feature,
  // `[num_outputs, dim]`. Refused if that is not what was asked for.
  Status LookUp(const std::vector<Span<const uint8_t>>& fetched,
                const RowKernels& kernels, const ParallelFor& parallel_for,
                const std::vector<float*>& activations) const;

  // Sums the gradients of each unique row in the order of the host engine, and
  // writes to each server what it is to apply. `fetched` is what it sent.
  Status Fold(const BatchGradients& gradients,
              const std::vector<Span<const uint8_t>>& fetched,
              const ClosureToken& token, const RowKernels& kernels,
              const ParallelFor& parallel_for, const Allocate& allocate) const;

 private:
  // A shard with its unique rows [first, last) of its table.
  struct Part {
    size_t table;
    int32_t server;
    int64_t first_row;
    int64_t first;
    int64_t last;
    int64_t num_unused;  // rows that come besides, after these
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
  // Of each part, how many rows an update sends for it, and all of these by
  // server. `is_single`: a row comes once for each contribution.
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
  // By feature: for each of its ids the place of its row among the unique ones.
  std::vector<std::vector<uint32_t>> ranks_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVERS_WORKER_STEP_H_
