// The embedding engine of one TPU system: the host engine with tables of its
// own, cut over the hosts, behind calls that may have to wait.

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
  // Memory for activations, by feature; asked for when they are there.
  using Allocate = std::function<Status(std::vector<float*>* activations)>;

  // One shard of a table: its rows, then its slots as the optimizer has them.
  using ShardValues = std::vector<Span<const float>>;

  // `serialized` is a TPUEmbeddingConfiguration for `num_cores` and
  // `num_hosts`. May throw std::bad_alloc: it allocates the tables.
  static Status Make(const std::string& serialized, int32_t num_cores,
                     int32_t num_hosts, std::shared_ptr<EmulatedEngine>* made);

  const TpuConfig& config() const { return config_; }
  PendingCalls& pending_calls() { return pending_calls_; }

  // Refuses an op that was traced for another configuration.
  Status CheckConfig(const std::string& serialized) const;

  // What follows returns Code::kNotYet if it is to be tried again after a
  // change. Batches of a core enter its queue in the order of their tickets.
  int64_t TakeEnqueueTicket(int32_t core);
  void ReturnEnqueueTicket(int32_t core, int64_t ticket);
  Status Enqueue(int32_t core, int64_t ticket, bool training,
                 const Status& made, std::shared_ptr<const Batch> batch,
                 const ParallelFor& parallel_for);
  Status Receive(int32_t core, const Allocate& allocate,
                 const ParallelFor& parallel_for);
  // `gradients.hyperparameters` are worked out here, from the `rates`.
  Status Send(int32_t core, BatchGradients gradients, Span<const float> rates,
              const ParallelFor& parallel_for);

  Status FindTable(const std::string& name, int64_t id, int32_t* table) const;
  // What a load or retrieve op says about itself, against the configuration.
  Status CheckShard(int32_t table, Optimizer optimizer, int64_t shard,
                    int64_t num_shards) const;
  Status Load(int32_t table, int32_t shard, const ShardValues& values,
              const ParallelFor& parallel_for);
  // Copies into memory of the shard's size.
  Status Retrieve(int32_t table, int32_t shard,
                  const std::vector<Span<float>>& values,
                  const ParallelFor& parallel_for);

  // Forgets every step in flight; the tables stay.
  void Reset();

  // A few lines: what each core's queue holds, and which calls wait.
  std::string Report() const;

 private:
  // Rows or one slot of a table, [shard size, dim] for each host.
  using Shards = std::vector<std::vector<float>>;
  struct Table {
    std::vector<Shards> values;   // rows, then slots
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
  Status Land(int32_t core, bool always, const ParallelFor& parallel_for);

  std::string serialized_;
  TpuConfig config_;
  std::unique_ptr<HostEngine> engine_;

  mutable std::mutex tickets_mutex_;
  int64_t num_tickets_ = 0;
  std::vector<std::deque<int64_t>> tickets_;  // by core

  mutable std::shared_mutex tables_mutex_;
  std::vector<Table> tables_;

  // The last member: its calls use all of the above.
  PendingCalls pending_calls_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_EMULATED_ENGINE_H_
