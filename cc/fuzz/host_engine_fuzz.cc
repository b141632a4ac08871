// Fuzzes calls of the host engine in any order. The target checks that no call
// ends the process, that the queue lengths match the accepted calls, and that
// rejected calls change nothing.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/ids/combiner.h"
#include "cc/core/ids/packed_ids.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"
#include "cc/core/tables/lookup.h"
#include "cc/fuzz/input_reader.h"

namespace layoutmap {
namespace {

constexpr int64_t kNumFeatures = 3;

EngineConfig TakeConfig(InputReader* input) {
  EngineConfig config;
  config.num_replicas = static_cast<int32_t>(1 + input->Below(3));
  config.max_pending_steps = 1 + input->Below(3);
  const int64_t num_tables = 1 + input->Below(2);
  for (int64_t t = 0; t < num_tables; ++t) {
    TableSpec table;
    table.name = "table" + std::to_string(t);
    const std::vector<int64_t> offsets = {0, input->Below(9),
                                          9 + input->Below(9)};
    FUZZ_CHECK(
        RowPartition::Make(Placement::kOffsets, offsets, &table.partition)
            .ok());
    table.dim = 1 + input->Below(20);
    table.optimizer =
        input->Below(2) == 0 ? Optimizer::kSgd : Optimizer::kAdagrad;
    config.tables.push_back(table);
  }
  for (int64_t f = 0; f < kNumFeatures; ++f) {
    FeatureSpec feature;
    feature.feature = "feature" + std::to_string(f);
    const int32_t t = static_cast<int32_t>(input->Below(num_tables));
    feature.table = config.tables[t].name;
    feature.num_rows = config.tables[t].partition.num_rows();
    feature.combiner = static_cast<Combiner>(input->Below(3));
    feature.max_sequence_length = input->Below(3);
    config.features.push_back(feature);
    config.table_of_feature.push_back(t);
  }
  return config;
}

class Driver {
 public:
  explicit Driver(InputReader* input)
      : input_(input),
        config_(TakeConfig(input)),
        pending_(config_.num_replicas),
        awaiting_(config_.num_replicas),
        batches_(config_.num_replicas) {
    FUZZ_CHECK(HostEngine::Make(config_, &engine_).ok());
    for (const TableSpec& table : config_.tables) {
      const int64_t size = table.partition.num_rows() * table.dim;
      tables_.emplace_back(size, 1.0f);
      slots_.emplace_back(size, 0.1f);
    }
  }

  void Run() {
    for (int call = 0; call < 40; ++call) {
      const int32_t replica =
          static_cast<int32_t>(input_->Below(config_.num_replicas));
      switch (input_->Below(8)) {
        case 0:
        case 1:
        case 2:
          Enqueue(replica);
          break;
        case 3:
        case 4:
          Dequeue(replica);
          break;
        case 5:
        case 6:
          Apply(replica);
          break;
        default:
          Misuse();
      }
      CheckDescription();
    }
  }

 private:
  void Enqueue(int32_t replica) {
    const bool training = input_->Below(4) != 0;
    std::vector<std::vector<int64_t>> ids(kNumFeatures), splits(kNumFeatures);
    std::vector<FeatureInput<int64_t>> features(kNumFeatures);
    for (int64_t f = 0; f < kNumFeatures; ++f) {
      const int64_t num_samples = input_->Below(4);
      splits[f] = {0};
      for (int64_t s = 0; s < num_samples; ++s) {
        splits[f].push_back(splits[f].back() + input_->Below(4));
      }
      ids[f] = input_->MostlyBelow<int64_t>(splits[f].back(),
                                            config_.features[f].num_rows);
      features[f].ids = ids[f];
      features[f].splits = splits[f];
      features[f].num_samples = num_samples;
    }
    const Status status =
        input_->Below(4) == 0
            ? EnqueuePacked(replica, training)
            : engine_->Enqueue(replica, training, features, SerialFor);
    if (status.ok()) {
      ++pending_[replica];
    } else if (config_.num_replicas > 1) {
      poisoned_ = true;
    }
  }

  // Enqueues a packed batch. In most cases, its marks, numbers of ids and ids
  // are valid.
  Status EnqueuePacked(int32_t replica, bool training) {
    PackedInput input;
    const int64_t num_samples = input_->Below(4);
    const int64_t num_columns = input_->Below(4 * kNumFeatures);
    std::vector<int64_t> ids =
        input_->MostlyBelow<int64_t>(num_samples * num_columns, 3);
    const std::vector<float> weights(ids.size(), 0.5f);
    input.ids = {ids.data(), num_samples, num_columns};
    if (input_->Below(2) == 0) {
      input.weights = {weights.data(), num_samples, num_columns};
    }
    for (int64_t s = 0; s < num_samples && num_columns > 0; ++s) {
      if (input_->Below(20) != 0) ids[s * num_columns] = input.mark;
    }
    return engine_->Enqueue(replica, training, input, SerialFor);
  }

  void Dequeue(int32_t replica) {
    std::shared_ptr<const Batch> batch;
    if (!engine_->BeginDequeue(replica, &batch).ok()) return;
    FUZZ_CHECK(pending_[replica] > 0 && !awaiting_[replica] && !poisoned_);
    const bool looked_up = input_->Below(6) != 0;
    for (size_t f = 0; looked_up && f < batch->size(); ++f) {
      const RaggedIds& ids = (*batch)[f];
      const int64_t dim = config_.dim_of_feature(f);
      std::vector<float> out(ids.num_outputs() * dim);
      Lookup(MakeView<const float>(config_.table_of_feature[f], tables_),
             ids.rows(), ids.splits(), ids.gains(),
             RowKernelsFor(CurrentCpuLevel()), SerialFor,
             {out.data(), ids.num_outputs(), dim});
    }
    engine_->FinishDequeue(replica, looked_up);
    if (!looked_up) return;
    --pending_[replica];
    batches_[replica] = batch;
    // The value is copied from the engine, because the target does not record
    // whether the step is a training step.
    awaiting_[replica] = engine_->Describe().awaiting[replica];
  }

  void Apply(int32_t replica) {
    auto values = std::make_shared<std::vector<std::vector<float>>>();
    const bool fitting = batches_[replica] != nullptr && input_->Below(6) != 0;
    for (int64_t f = 0; f < kNumFeatures; ++f) {
      const int64_t size = fitting ? (*batches_[replica])[f].num_outputs() *
                                         config_.dim_of_feature(f)
                                   : input_->Below(9);
      values->emplace_back(size, 0.5f);
    }
    BatchGradients gradients;
    for (const std::vector<float>& value : *values) {
      gradients.features.push_back(value);
    }
    gradients.keep_alive = values;
    std::shared_ptr<HostEngine::Step> step;
    const Status status =
        engine_->BeginApply(replica, std::move(gradients), &step);
    if (!status.ok()) return;
    FUZZ_CHECK(awaiting_[replica] && !poisoned_);
    if (step == nullptr) {
      awaiting_[replica] = false;
      return;
    }
    const std::vector<float> rate = {input_->Below(6) == 0 ? -1.0f : 0.5f};
    std::vector<HostEngine::TableViews> views(config_.tables.size());
    for (size_t t = 0; t < views.size(); ++t) {
      views[t].table = MakeView<float>(t, tables_);
      if (NumSlots(config_.tables[t].optimizer) == 1) {
        views[t].slots.push_back(MakeView<float>(t, slots_));
      }
      views[t].hyperparameters = rate;
    }
    const Status updated = engine_->Update(
        *step, views, RowKernelsFor(CurrentCpuLevel()), SerialFor);
    FUZZ_CHECK(updated.ok() == (rate[0] >= 0));
    engine_->FinishApply(replica, updated.ok());
    if (!updated.ok()) return;
    awaiting_[replica] = false;
    ++num_updates_;
  }

  void Misuse() {
    const int32_t nobody = input_->Take<int32_t>();
    std::shared_ptr<const Batch> batch;
    switch (input_->Below(4)) {
      case 0:
        engine_->Reset();
        pending_.assign(config_.num_replicas, 0);
        awaiting_.assign(config_.num_replicas, false);
        poisoned_ = false;
        break;
      case 1:
        if (nobody >= 0 && nobody < config_.num_replicas) return;
        FUZZ_CHECK(engine_->BeginDequeue(nobody, &batch).code() ==
                   Code::kInvalidArgument);
        break;
      case 2:
        // Calls FinishDequeue without BeginDequeue, which also happens if the
        // engine is reset between the two calls.
        engine_->FinishDequeue(0, true);
        break;
      default:
        engine_->FinishApply(0, true);
    }
  }

  template <typename T>
  ShardedView<T> MakeView(size_t t, std::vector<std::vector<float>>& rows) {
    const TableSpec& table = config_.tables[t];
    ShardedView<T> view;
    view.partition = &table.partition;
    view.dim = table.dim;
    for (int32_t s = 0; s < table.partition.num_shards(); ++s) {
      view.shards.push_back(rows[t].data() +
                            table.partition.offsets()[s] * table.dim);
    }
    return view;
  }

  void CheckDescription() const {
    const HostEngine::Description d = engine_->Describe();
    for (int32_t r = 0; r < config_.num_replicas; ++r) {
      FUZZ_CHECK(d.pending[r] == pending_[r]);
      FUZZ_CHECK(d.pending[r] <= config_.max_pending_steps);
      FUZZ_CHECK(d.awaiting[r] == awaiting_[r]);
    }
    FUZZ_CHECK(d.num_updates == num_updates_);
    FUZZ_CHECK(d.poisoned.empty() == !poisoned_);
  }

  InputReader* input_;
  const EngineConfig config_;
  std::unique_ptr<HostEngine> engine_;
  std::vector<std::vector<float>> tables_, slots_;
  // The expected state of the engine after the accepted calls.
  std::vector<int64_t> pending_;
  std::vector<bool> awaiting_;
  std::vector<std::shared_ptr<const Batch>> batches_;
  int64_t num_updates_ = 0;
  bool poisoned_ = false;
};

}  // namespace
}  // namespace layoutmap

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  layoutmap::InputReader input(data, size);
  layoutmap::Driver(&input).Run();
  return 0;
}
