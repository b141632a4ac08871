// Test classes that own an engine with its tables and call the engine in the
// same way as the kernels.

#ifndef TF_LAYOUTMAP_CORE_ENGINE_ENGINE_TEST_H_
#define TF_LAYOUTMAP_CORE_ENGINE_ENGINE_TEST_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/ids/combiner.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"
#include "cc/core/tables/lookup.h"
#include "cc/core/tables/table_test.h"
#include "gtest/gtest.h"

namespace layoutmap {

constexpr float kLearningRate = 0.25f;

// The ids and the weights of one feature, with one list per sample.
struct Bags {
  std::vector<std::vector<int64_t>> ids;
  std::vector<std::vector<float>> weights;  // If empty, all weights are 1.
};

using TestBatch = std::vector<Bags>;  // One element per feature.
using Values = std::vector<std::vector<float>>;

// Returns a configuration with two tables and three features. The features
// `clicked` and `shown` share the first table. The feature `text` is a sequence
// and uses the second table.
inline EngineConfig TestConfig(int32_t num_replicas) {
  EngineConfig config;
  config.num_replicas = num_replicas;
  config.max_pending_steps = 2;
  config.tables.resize(2);
  config.tables[0].name = "ads";
  config.tables[0].partition =
      MakePartition(Placement::kDiv, EvenOffsets(11, 2));
  config.tables[0].dim = 3;
  config.tables[0].optimizer = Optimizer::kAdagrad;
  config.tables[1].name = "words";
  config.tables[1].partition =
      MakePartition(Placement::kMod, EvenOffsets(7, 3));
  config.tables[1].dim = 5;
  config.tables[1].optimizer = Optimizer::kSgd;
  const auto add = [&](const char* name, int32_t table, Combiner combiner,
                       int64_t length) {
    FeatureSpec feature;
    feature.feature = name;
    feature.table = config.tables[table].name;
    feature.num_rows = config.tables[table].partition.num_rows();
    feature.combiner = combiner;
    feature.max_sequence_length = length;
    config.features.push_back(feature);
    config.table_of_feature.push_back(table);
  };
  add("clicked", 0, Combiner::kMean, 0);
  add("text", 1, Combiner::kSum, 2);
  add("shown", 0, Combiner::kSum, 0);
  return config;
}

inline TestBatch RandomBatch(const EngineConfig& config, int64_t num_samples,
                             uint32_t seed) {
  std::mt19937 random(seed);
  TestBatch batch(config.features.size());
  for (size_t f = 0; f < batch.size(); ++f) {
    const bool weighted =
        config.features[f].max_sequence_length == 0 && random() % 2;
    for (int64_t s = 0; s < num_samples; ++s) {
      std::vector<int64_t> ids(random() % 4);
      std::vector<float> weights(ids.size());
      for (int64_t& id : ids) id = random() % config.features[f].num_rows;
      for (float& weight : weights) weight = 1 + random() % 4;
      batch[f].ids.push_back(ids);
      if (weighted) batch[f].weights.push_back(weights);
    }
  }
  return batch;
}

class Trainer {
 public:
  explicit Trainer(EngineConfig config)
      : parallel_for(SerialFor), config_(std::move(config)) {
    const Status status = HostEngine::Make(config_, &engine_);
    EXPECT_TRUE(status.ok()) << status.message();
    for (size_t t = 0; t < config_.tables.size(); ++t) {
      const TableSpec& table = config_.tables[t];
      tables_.emplace_back(table.partition, table.dim, 10 + t);
      accumulators_.emplace_back(table.partition, table.dim, 20 + t);
      for (std::vector<float>& shard : accumulators_[t].shards()) {
        for (float& value : shard) value = 0.5f;
      }
    }
  }

  HostEngine& engine() { return *engine_; }
  const EngineConfig& config() const { return config_; }
  std::vector<TestTable>& tables() { return tables_; }
  std::vector<TestTable>& accumulators() { return accumulators_; }

  Status Enqueue(int32_t replica, const TestBatch& batch,
                 bool training = true) {
    return WithFeatures(batch, [&](const auto& features) {
      return engine_->Enqueue(replica, training, features, parallel_for);
    });
  }

  std::shared_ptr<const Batch> MakeBatch(const TestBatch& batch) {
    std::shared_ptr<const Batch> made;
    const Status status = WithFeatures(batch, [&](const auto& features) {
      return engine_->MakeBatch(features, SerialFor, &made);
    });
    EXPECT_TRUE(status.ok()) << status.message();
    return made;
  }

  template <typename Use>
  Status WithFeatures(const TestBatch& batch, const Use& use) {
    std::vector<std::vector<int64_t>> ids(batch.size()), splits(batch.size());
    std::vector<std::vector<float>> weights(batch.size());
    std::vector<FeatureInput<int64_t>> features(batch.size());
    for (size_t f = 0; f < batch.size(); ++f) {
      splits[f].push_back(0);
      for (const std::vector<int64_t>& sample : batch[f].ids) {
        ids[f].insert(ids[f].end(), sample.begin(), sample.end());
        splits[f].push_back(ids[f].size());
      }
      for (const std::vector<float>& sample : batch[f].weights) {
        weights[f].insert(weights[f].end(), sample.begin(), sample.end());
      }
      features[f].ids = ids[f];
      features[f].splits = splits[f];
      features[f].num_samples = batch[f].ids.size();
      features[f].weights = weights[f];
    }
    return use(features);
  }

  static BatchGradients MakeGradients(Values gradients) {
    BatchGradients batch;
    auto values = std::make_shared<Values>(std::move(gradients));
    for (const std::vector<float>& value : *values) {
      batch.features.push_back(value);
    }
    batch.keep_alive = values;
    return batch;
  }

  // Runs an update on the tables.
  Status Update(const HostEngine::Step& step,
                float learning_rate = kLearningRate) {
    const std::vector<float> hyperparameters = {learning_rate};
    std::unique_lock<std::shared_mutex> lock(tables_mutex_);
    std::vector<HostEngine::TableViews> views(tables_.size());
    for (size_t t = 0; t < views.size(); ++t) {
      views[t].table = tables_[t].MutableView();
      if (NumSlots(config_.tables[t].optimizer) == 1) {
        views[t].slots.push_back(accumulators_[t].MutableView());
      }
      views[t].hyperparameters = hyperparameters;
    }
    return engine_->Update(step, views, RowKernelsFor(CurrentCpuLevel()),
                           parallel_for);
  }

  Status Dequeue(int32_t replica, Values* activations = nullptr) {
    std::shared_ptr<const Batch> batch;
    LM_RETURN_IF_ERROR(engine_->BeginDequeue(replica, &batch));
    {
      std::shared_lock<std::shared_mutex> lock(tables_mutex_);
      for (size_t f = 0; f < batch->size(); ++f) {
        const RaggedIds& ids = (*batch)[f];
        const TestTable& table = tables_[config_.table_of_feature[f]];
        std::vector<float> out(ids.num_outputs() * table.dim());
        Lookup(table.View(), ids.rows(), ids.splits(), ids.gains(),
               RowKernelsFor(CurrentCpuLevel()), parallel_for,
               {out.data(), ids.num_outputs(), table.dim()});
        if (activations != nullptr) activations->push_back(std::move(out));
      }
    }
    engine_->FinishDequeue(replica, true);
    return Status();
  }

  Status Apply(int32_t replica, Values gradients,
               float learning_rate = kLearningRate) {
    std::shared_ptr<HostEngine::Step> step;
    LM_RETURN_IF_ERROR(engine_->BeginApply(
        replica, MakeGradients(std::move(gradients)), &step));
    if (step == nullptr) return Status();
    const Status status = Update(*step, learning_rate);
    engine_->FinishApply(replica, status.ok());
    return status;
  }

  ParallelFor parallel_for;

 private:
  EngineConfig config_;
  std::unique_ptr<HostEngine> engine_;
  // This mutex replaces the locks that TensorFlow variables have.
  std::shared_mutex tables_mutex_;
  std::vector<TestTable> tables_;
  std::vector<TestTable> accumulators_;
};

// Returns how many of the `num_ids` ids of a sample a feature uses.
inline int64_t NumUsed(const FeatureSpec& spec, int64_t num_ids) {
  const int64_t length = spec.max_sequence_length;
  return length > 0 ? std::min(length, num_ids) : num_ids;
}
inline int64_t OutputRow(const FeatureSpec& spec, int64_t sample, int64_t i) {
  const int64_t length = spec.max_sequence_length;
  return length > 0 ? sample * length + i : sample;
}

// Returns the gains of the ids in one sample.
inline std::vector<float> GainsOf(const FeatureSpec& spec, const Bags& bags,
                                  int64_t sample) {
  const int64_t num_ids = NumUsed(spec, bags.ids[sample].size());
  std::vector<float> weights(num_ids, 1.0f);
  if (!bags.weights.empty()) weights = bags.weights[sample];
  if (spec.max_sequence_length > 0) return weights;
  std::vector<float> gains(num_ids);
  CombineGains(spec.combiner, std::vector<int64_t>{0, num_ids}, weights, gains);
  return gains;
}

inline Values ReferenceActivations(const EngineConfig& config,
                                   std::vector<TestTable>* tables,
                                   const TestBatch& batch) {
  Values activations;
  for (size_t f = 0; f < batch.size(); ++f) {
    const FeatureSpec& spec = config.features[f];
    TestTable& table = (*tables)[config.table_of_feature[f]];
    const int64_t num_samples = batch[f].ids.size();
    std::vector<float> out(OutputRow(spec, num_samples, 0) * table.dim());
    for (int64_t s = 0; s < num_samples; ++s) {
      const std::vector<float> gains = GainsOf(spec, batch[f], s);
      for (size_t i = 0; i < gains.size(); ++i) {
        const float* row = table.row(batch[f].ids[s][i]);
        for (int64_t c = 0; c < table.dim(); ++c) {
          out[OutputRow(spec, s, i) * table.dim() + c] += gains[i] * row[c];
        }
      }
    }
    activations.push_back(std::move(out));
  }
  return activations;
}

// Runs one update of all replicas row by row, as a reference. For each row, the
// gradients are summed in the order feature, replica, sample, position.
inline void ReferenceUpdate(const EngineConfig& config,
                            const std::vector<TestBatch>& batches,
                            const std::vector<Values>& gradients,
                            std::vector<TestTable>* tables,
                            std::vector<TestTable>* accumulators) {
  for (size_t t = 0; t < config.tables.size(); ++t) {
    const int64_t dim = config.tables[t].dim;
    std::map<int64_t, std::vector<float>> sums;
    for (size_t f = 0; f < config.features.size(); ++f) {
      if (config.table_of_feature[f] != static_cast<int32_t>(t)) continue;
      const FeatureSpec& spec = config.features[f];
      for (size_t r = 0; r < batches.size(); ++r) {
        const Bags& bags = batches[r][f];
        for (size_t s = 0; s < bags.ids.size(); ++s) {
          const std::vector<float> gains = GainsOf(spec, bags, s);
          for (size_t i = 0; i < gains.size(); ++i) {
            std::vector<float>& sum = sums[bags.ids[s][i]];
            sum.resize(dim);
            const float* gradient =
                gradients[r][f].data() + OutputRow(spec, s, i) * dim;
            for (int64_t c = 0; c < dim; ++c) sum[c] += gains[i] * gradient[c];
          }
        }
      }
    }
    for (const auto& [row, g] : sums) {
      float* p = (*tables)[t].row(row);
      float* a = (*accumulators)[t].row(row);
      for (int64_t c = 0; c < dim; ++c) {
        if (config.tables[t].optimizer == Optimizer::kSgd) {
          p[c] -= kLearningRate * g[c];
        } else {
          a[c] += g[c] * g[c];
          p[c] -= kLearningRate * g[c] / std::sqrt(a[c]);
        }
      }
    }
  }
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_ENGINE_ENGINE_TEST_H_
