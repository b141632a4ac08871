// The embedding engine of one TPU system. It owns a host engine and tables that
// are sharded over the hosts. A call may have to wait for other calls.

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
  // Function that allocates memory for the activations of each feature, called
  // when the activations are available.
  using Allocate = std::function<Status(std::vector<float*>* activations)>;

  // The values of one table shard. The first element contains the rows. The
  // following elements contain the slot variables in the optimizer's order.
  using ShardValues = std::vector<Span<const float>>;

  // Creates an engine. `serialized` is a TPUEmbeddingConfiguration for
  // `num_cores` cores and `num_hosts` hosts. The function allocates the tables
  // and can therefore throw std::bad_alloc.
  static Status Make(const std::string& serialized, int32_t num_cores,
                     int32_t num_hosts, std::shared_ptr<EmulatedEngine>* made);

  const TpuConfig& config() const { return config_; }
  PendingCalls& pending_calls() { return pending_calls_; }

  // Returns an error if `serialized`, the configuration of an op, is not the
  // configuration of the engine.
  Status CheckConfig(const std::string& serialized) const;

  // The following methods return Code::kNotYet if the caller must repeat the
  // call after another call has changed the state. The batches of a core enter
  // its queue in the order of their tickets.
  int64_t TakeEnqueueTicket(int32_t core);
  void ReturnEnqueueTicket(int32_t core, int64_t ticket);
  Status Enqueue(int32_t core, int64_t ticket, bool training,
                 const Status& made, std::shared_ptr<const Batch> batch,
                 const ParallelFor& parallel_for);
  Status Receive(int32_t core, const Allocate& allocate,
                 const ParallelFor& parallel_for);
  // Passes gradients to the engine. `rates` are the dynamic learning rates. The
  // method computes `gradients.hyperparameters` from them.
  Status Send(int32_t core, BatchGradients gradients, Span<const float> rates,
              const ParallelFor& parallel_for);

  Status FindTable(const std::string& name, int64_t id, int32_t* table) const;
  // Returns an error if the arguments of a load or retrieve op do not match the
  // configuration.
  Status CheckShard(int32_t table, Optimizer optimizer, int64_t shard,
                    int64_t num_shards) const;
  Status Load(int32_t table, int32_t shard, const ShardValues& values,
              const ParallelFor& parallel_for);
  // Copies the values of a shard to `values`, whose memory must have the size
  // of the shard.
  Status Retrieve(int32_t table, int32_t shard,
                  const std::vector<Span<float>>& values,
                  const ParallelFor& parallel_for);

  // Discards all steps in flight. The tables stay unchanged.
  void Reset();

  // Returns a text of a few lines that contains the number of batches in the
  // queue of each core, and the names of the waiting calls.
  std::string Report() const;

 private:
  // The rows or one slot variable of a table. Each host has one shard, [shard
  // size, dim].
  using Shards = std::vector<std::vector<float>>;
  struct Table {
    // The rows, followed by the slot variables.
    std::vector<Shards> values;
    // Whether the shard of each host is loaded.
    std::vector<bool> is_loaded;
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
  // The tickets of each core.
  std::vector<std::deque<int64_t>> tickets_;

  mutable std::shared_mutex tables_mutex_;
  std::vector<Table> tables_;

  // This must be the last member, because the pending calls use all members
  // above.
  PendingCalls pending_calls_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_EMULATION_EMULATED_ENGINE_H_
