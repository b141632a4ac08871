// The embedding engine of one TPU system: the host engine with private tables,
// sharded over the hosts. Its calls may have to wait.

#ifndef TF_LAYOUTMAP_EMULATION_EMULATED_ENGINE_H_
#define TF_LAYOUTMAP_EMULATION_EMULATED_ENGINE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/steps/step.h"
#include "cc/emulation/config/tpu_config.h"
#include "cc/emulation/pending_calls.h"

namespace layoutmap {

class EmulatedEngine {
 public:
  // Allocates memory for the activations of each feature, when they are
  // available.
  using Allocate = std::function<Status(std::vector<float*>* activations)>;

  // One shard of a table: its rows, then its slot variables in the optimizer's
  // order.
  using ShardValues = std::vector<Span<const float>>;

  // Creates an engine. `serialized` is a TPUEmbeddingConfiguration for
  // `num_cores` cores and `num_hosts` hosts. May throw std::bad_alloc, because
  // it allocates the tables.
  static Status Make(const std::string& serialized, int32_t num_cores,
                     int32_t num_hosts, std::shared_ptr<EmulatedEngine>* made);

  const TpuConfig& config() const { return config_; }
  PendingCalls& pending_calls() { return pending_calls_; }

  // Fails if an op was traced for another configuration.
  Status CheckConfig(const std::string& serialized) const;

  // The following methods return Code::kNotYet if the caller must try again
  // after a change. Batches of a core enter its queue in the order of their
  // tickets.
  int64_t TakeEnqueueTicket(int32_t core);
  void ReturnEnqueueTicket(int32_t core, int64_t ticket);
  Status Enqueue(int32_t core, int64_t ticket, bool training,
                 const Status& made, std::shared_ptr<const Batch> batch,
                 const ParallelFor& parallel_for);
  Status Receive(int32_t core, const Allocate& allocate,
                 const ParallelFor& parallel_for);
  // Computes `gradients.hyperparameters` from `rates`.
  Status Send(int32_t core, BatchGradients gradients, Span<const float> rates,
              const ParallelFor& parallel_for);

  Status FindTable(const std::string& name, int64_t id, int32_t* table) const;
  // Checks the arguments of a load or retrieve op against the configuration.
  Status CheckShard(int32_t table, Optimizer optimizer, int64_t shard,
                    int64_t num_shards) const;
  Status Load(int32_t table, int32_t shard, const ShardValues& values,
              const ParallelFor& parallel_for);
  // Copies the values into memory of the shard's size.
  Status Retrieve(int32_t table, int32_t shard,
                  const std::vector<Span<float>>& values,
                  const ParallelFor& parallel_for);

  // Discards all steps in flight but keeps the tables.
  void Reset();

  // Returns a few lines: the number of batches in the queue of each core, and
  // the waiting calls.
  std::string Report() const;

 private:
  // Rows or one slot variable of a table, [shard size, dim] for each host.
  using Shards = std::vector<std::vector<float>>;
  struct Table {
    std::vector<Shards> values;   // rows, then slot variables
    std::vector<bool> is_loaded;  // by host
  };

  EmulatedEngine() = default;

  Status CheckCore(int32_t core) const;
  Status CheckLoaded() const;
  Status LookUp(const Batch& batch, const Allocate& allocate,
                const ParallelFor& parallel_for) const;
  std::vector<float> HyperparametersOf(size_t table,
                                       Span<const float> rates) const;
  Status RunUpdate(const HostEngine::Step& step,
                   const ParallelFor& parallel_for);
  Status ApplyPendingUpdate(int32_t core, bool always,
                            const ParallelFor& parallel_for);

  std::string serialized_;
  TpuConfig config_;
  std::unique_ptr<HostEngine> engine_;

  mutable std::mutex tickets_mutex_;
  int64_t num_tickets_ = 0;
  std::vector<std::deque<int64_t>> tickets_;  // by core

  mutable std::shared_mutex tables_mutex_;
  std::vector<Table> tables_;

  // Must be the last member, because its calls use all members above.
  PendingCalls pending_calls_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_EMULATED_ENGINE_H_
