#include "cc/emulation/emulated_engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/combiner.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"
#include "cc/emulation/config/config_test.h"
#include "cc/emulation/config/tpu_config.h"
#include "cc/emulation/core_batch.h"
#include "cc/emulation/pending_calls.h"
#include "cc/emulation/workers_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

using std::chrono::seconds;

constexpr int64_t kNumSamples = 4;  // Per core.

// Returns the batch of one core in one step. The ids are ragged.
std::shared_ptr<const Batch> MakeTestBatch(const TpuConfig& config, int core,
                                           int step) {
  std::mt19937 random(100 * core + step);
  auto batch = std::make_shared<Batch>(config.engine.features.size());
  for (size_t f = 0; f < batch->size(); ++f) {
    std::vector<int64_t> splits = {0}, ids;
    for (int64_t s = 0; s < kNumSamples; ++s) {
      splits.push_back(splits.back() + random() % 4);
    }
    for (int64_t i = 0; i < splits.back(); ++i) {
      ids.push_back(random() % config.engine.features[f].num_rows);
    }
    CoreInput<int64_t> input;
    input.locations = splits;
    input.ids = ids;
    EXPECT_TRUE(
        MakeCoreIds(config, f, Combiner::kMean, input, &(*batch)[f]).ok());
  }
  return batch;
}

// The cores of a TPU. Their calls are pending calls, like the calls of the
// kernels.
class Cores {
 public:
  Cores(int num_hosts, int num_cores, bool is_pipelined = false) {
    const Status status = EmulatedEngine::Make(
        TestTpuConfig(num_hosts, num_cores, kNumSamples, is_pipelined),
        num_cores, num_hosts, &engine_);
    EXPECT_TRUE(status.ok()) << status.message();
    for (int32_t t : {0, 1}) {
      for (int host = 0; host < num_hosts; ++host) {
        EXPECT_TRUE(Load(t, host).ok());
      }
    }
  }

  EmulatedEngine& engine() { return *engine_; }

  Status Enqueue(int core, int step, bool training = true) {
    const int64_t ticket = engine_->TakeEnqueueTicket(core);
    auto batch = MakeTestBatch(engine_->config(), core, step);
    const Status status = Run([=] {
      return engine_->Enqueue(core, ticket, training, Status(), batch,
                              SerialFor);
    });
    engine_->ReturnEnqueueTicket(core, ticket);
    return status;
  }

  // Receives the activations of a core and computes their sum.
  Status Receive(int core, double* sum) {
    std::vector<std::vector<float>> values;
    for (size_t f = 0; f < 3; ++f) {
      values.emplace_back(engine_->config().num_outputs(f) *
                          engine_->config().engine.dim_of_feature(f));
    }
    const auto allocate = [&](std::vector<float*>* activations) {
      activations->clear();
      for (std::vector<float>& value : values) {
        activations->push_back(value.data());
      }
      return Status();
    };
    const Status status =
        Run([&] { return engine_->Receive(core, allocate, SerialFor); });
    for (const std::vector<float>& value : values) {
      for (const float one : value) *sum += one;
    }
    return status;
  }

  Status Send(int core, int step) {
    auto values = std::make_shared<std::vector<std::vector<float>>>();
    BatchGradients gradients;
    for (size_t f = 0; f < 3; ++f) {
      values->emplace_back(engine_->config().num_outputs(f) *
                               engine_->config().engine.dim_of_feature(f),
                           0.25f * (core + 1) + 0.125f * step);
    }
    for (const std::vector<float>& value : *values) {
      gradients.features.push_back(value);
    }
    gradients.keep_alive = values;
    return Run([&] { return engine_->Send(core, gradients, {}, SerialFor); });
  }

  std::vector<float> Table(int32_t table) {
    std::vector<float> all;
    const TableSpec& spec = engine_->config().engine.tables[table];
    for (int32_t host = 0; host < spec.partition.num_shards(); ++host) {
      const int64_t size = spec.partition.shard_size(host) * spec.dim;
      std::vector<float> rows(size), slot(size);
      std::vector<Span<float>> values = {rows};
      if (NumSlots(spec.optimizer) == 1) values.push_back(slot);
      EXPECT_TRUE(engine_->Retrieve(table, host, values, SerialFor).ok());
      all.insert(all.end(), rows.begin(), rows.end());
      all.insert(all.end(), slot.begin(), slot.end());
    }
    return all;
  }

  Status Load(int32_t table, int32_t host) {
    const TableSpec& spec = engine_->config().engine.tables[table];
    const int64_t size = spec.partition.shard_size(host) * spec.dim;
    const std::vector<float> rows(size, 1.0f), slot(size, 0.5f);
    EmulatedEngine::ShardValues values = {rows};
    if (NumSlots(spec.optimizer) == 1) values.push_back(slot);
    return engine_->Load(table, host, values, SerialFor);
  }

 private:
  // Runs a pending call and waits for its end. Unlike the kernels, this
  // function blocks the calling thread.
  Status Run(std::function<Status()> attempt) {
    std::mutex mutex;
    std::condition_variable ended;
    bool is_ended = false;
    Status outcome;
    PendingCalls::Call call;
    call.name = "call";
    call.attempt = std::move(attempt);
    call.finish = [&](PendingCalls::End end, const Status& status) {
      std::lock_guard<std::mutex> lock(mutex);
      outcome = end == PendingCalls::End::kAttempted
                    ? status
                    : FailedPrecondition("ended: " + status.message());
      is_ended = true;
      ended.notify_all();
    };
    call.schedule = [this](std::function<void()> work) {
      workers_.Schedule(std::move(work));
    };
    call.patience = patience;
    engine_->pending_calls().Start(
        engine_->pending_calls().Admit(std::move(call)));
    std::unique_lock<std::mutex> lock(mutex);
    ended.wait(lock, [&] { return is_ended; });
    return outcome;
  }

 public:
  PendingCalls::Clock::duration patience = seconds(60);

 private:
  std::shared_ptr<EmulatedEngine> engine_;
  Workers workers_{4};
};

void ExpectOk(const Status& status) {
  EXPECT_TRUE(status.ok()) << status.message();
}

void ExpectRefused(const Status& status, const std::string& words) {
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find(words), std::string::npos)
      << status.message();
}

// Trains `num_steps` steps with two threads per core. One thread enqueues the
// batches, and the other thread runs the other calls. The order between the two
// threads is undefined, as it is in TensorFlow.
std::vector<float> TrainAtOnce(Cores* cores, int num_cores, int num_steps) {
  std::vector<std::thread> threads;
  std::atomic<int> num_wrong{0};
  for (int core = 0; core < num_cores; ++core) {
    threads.emplace_back([=, &num_wrong] {
      for (int step = 0; step < num_steps; ++step) {
        num_wrong += !cores->Enqueue(core, step).ok();
      }
    });
    threads.emplace_back([=, &num_wrong] {
      double sum = 0;
      for (int step = 0; step < num_steps; ++step) {
        num_wrong += !cores->Receive(core, &sum).ok();
        num_wrong += !cores->Send(core, step).ok();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_wrong, 0);
  return cores->Table(0);
}

TEST(EmulatedEngineTest, FourConcurrentCoresTrainLikeSequentialCores) {
  for (const bool is_pipelined : {false, true}) {
    Cores at_once(2, 4, is_pipelined), in_turn(2, 4, is_pipelined);
    double sum = 0;
    for (int step = 0; step < 50; ++step) {
      for (int core = 0; core < 4; ++core) {
        ExpectOk(in_turn.Enqueue(core, step));
      }
      for (int core = 0; core < 4; ++core) {
        ExpectOk(in_turn.Receive(core, &sum));
      }
      for (int core = 0; core < 4; ++core) ExpectOk(in_turn.Send(core, step));
    }
    EXPECT_EQ(TrainAtOnce(&at_once, 4, 50), in_turn.Table(0));
  }
}

TEST(EmulatedEngineTest, NumberOfHostsDoesNotChangeResults) {
  Cores one(1, 2), two(2, 2);
  std::vector<float> rows = TrainAtOnce(&one, 2, 10);
  std::vector<float> cut = TrainAtOnce(&two, 2, 10);
  std::sort(rows.begin(), rows.end());
  std::sort(cut.begin(), cut.end());
  EXPECT_EQ(rows, cut);
}

TEST(EmulatedEngineTest, EnqueueWaitsWhileTheQueueIsFull) {
  Cores cores(1, 1);
  std::thread enqueues([&] {
    for (int step = 0; step < 100; ++step) ExpectOk(cores.Enqueue(0, step));
  });
  double sum = 0;
  for (int step = 0; step < 100; ++step) {
    ExpectOk(cores.Receive(0, &sum));
    ExpectOk(cores.Send(0, step));
  }
  enqueues.join();
}

TEST(EmulatedEngineTest, CallsThatExpireAreReported) {
  Cores cores(1, 2);
  cores.patience = std::chrono::milliseconds(5);
  double sum = 0;
  ExpectOk(cores.Enqueue(0, 0));
  ExpectRefused(cores.Receive(1, &sum), "ended: `dequeue` needs an enqueued");
  EXPECT_NE(cores.engine().Report().find(
                "core 0: 1 batches wait for `dequeue`\n  core 1: 0 batches"),
            std::string::npos)
      << cores.engine().Report();
}

TEST(EmulatedEngineTest, OutOfOrderCallsFailImmediately) {
  Cores cores(1, 1);
  double sum = 0;
  ExpectRefused(cores.Send(0, 0), "needs a dequeued step");
  ExpectOk(cores.Enqueue(0, 0, /*training=*/false));
  ExpectRefused(cores.Load(0, 0), "while steps are in flight");
  ExpectOk(cores.Receive(0, &sum));
  ExpectRefused(cores.Send(0, 0), "training=False");
  ExpectOk(cores.Enqueue(0, 1));
  ExpectOk(cores.Receive(0, &sum));
  ExpectRefused(cores.Receive(0, &sum), "still awaits its gradients");
  ExpectRefused(cores.Load(0, 0), "while steps are in flight");
  cores.engine().Reset();
  ExpectOk(cores.Load(0, 0));
  ExpectRefused(cores.Receive(1, &sum), "`core` must be in [0, 0]");
}

TEST(EmulatedEngineTest, OpsOfAnotherEmbeddingFail) {
  Cores cores(2, 2);
  EmulatedEngine& engine = cores.engine();
  ExpectOk(engine.CheckConfig(""));
  ExpectOk(engine.CheckConfig(TestTpuConfig(2, 2)));
  ExpectRefused(engine.CheckConfig(TestTpuConfig(2, 2, 8)),
                "another embedding");
  int32_t table;
  ExpectOk(engine.FindTable("words", -1, &table));
  EXPECT_EQ(table, 1);
  ExpectOk(engine.FindTable("", 0, &table));
  ExpectRefused(engine.FindTable("none", -1, &table),
                "must have a table 'none'");
  ExpectOk(engine.CheckShard(0, Optimizer::kAdagrad, 1, 2));
  ExpectRefused(engine.CheckShard(0, Optimizer::kAdam, 1, 2),
                "its optimizer is Adagrad");
  ExpectRefused(engine.CheckShard(0, Optimizer::kAdagrad, 2, 2), "2 shards");
  std::shared_ptr<EmulatedEngine> other;
  ExpectRefused(EmulatedEngine::Make(TestTpuConfig(2, 4), 2, 2, &other),
                "The emulation has 2 cores on 2 hosts");
}

}  // namespace
}  // namespace layoutmap
