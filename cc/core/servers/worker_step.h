// The worker's half of a step: which rows of which server it needs, what comes
// of them, and which gradients go back. It keeps nothing between steps.

#ifndef TF_LAYOUTMAP_CORE_SERVERS_WORKER_STEP_H_
#define TF_LAYOUTMAP_CORE_SERVERS_WORKER_STEP_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/engine/engine_config.h"
#include "cc/core/engine/step.h"
#include "cc/core/servers/messages.h"
#include "cc/core/simd/row_kernels.h"

namespace layoutmap {

// Tables and features, as of a host engine of one replica, and where shards
// are.
struct ServersConfig {
  EngineConfig engine;
  int32_t num_servers = 1;
  // Of all shards of the first table, then those of the second, and so on.
  std::vector<int32_t> server_of_shard;
};

// Refuses shards that are not contiguous rows, or on no server.
Status CheckServersConfig(const ServersConfig& config);

// What goes to one server.
struct ServerMessage {
  std::vector<uint32_t> words;
  std::vector<float> values;
};

// One batch. Not written to after it is made.
class WorkerStep {
 public:
  // Finds the unique rows of a checked batch, table by table.
  static std::shared_ptr<const WorkerStep> Make(
      std::shared_ptr<const ServersConfig> config,
      std::shared_ptr<const Batch> batch, const ParallelFor& parallel_for);

  const ServersConfig& config() const { return *config_; }
  const Batch& batch() const { return *batch_; }

  // The words of the fetch of each server.
  std::vector<std::vector<uint32_t>> FetchWords() const;

  // Looks the batch up in what the servers sent, into one matrix per feature,
  // `[num_outputs, dim]`. Refused if that is not what was asked for.
  Status LookUp(const std::vector<Span<const float>>& fetched,
                const RowKernels& kernels, const ParallelFor& parallel_for,
                const std::vector<float*>& activations) const;

  // Sums the gradients of each unique row in the order of the host engine, and
  // writes to each server what it is to apply. `fetched` is what it sent.
  Status Fold(const BatchGradients& gradients,
              const std::vector<Span<const float>>& fetched,
              const ClosureToken& token, const RowKernels& kernels,
              const ParallelFor& parallel_for,
              std::vector<ServerMessage>* messages) const;

 private:
  // A shard with its unique rows [first, last) of its table.
  struct Part {
    size_t table;
    int32_t server;
    int64_t first_row;
    int64_t first;
    int64_t last;
  };

  WorkerStep() = default;

  Status CheckFetched(const std::vector<Span<const float>>& fetched) const;
  void RankRows(size_t table, const std::vector<uint32_t>& positions);

  std::shared_ptr<const ServersConfig> config_;
  std::shared_ptr<const Batch> batch_;
  std::vector<TableStep> tables_;
  std::vector<Part> parts_;  // by table, then by shard
  // By feature: for each of its ids the place of its row among the unique ones.
  std::vector<std::vector<uint32_t>> ranks_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_SERVERS_WORKER_STEP_H_
