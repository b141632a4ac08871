// Kernels for steps whose tables are sharded over processes. They write the
// messages to the owners of shards, and read the messages that an owner
// receives.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/engine/host_engine.h"
#include "cc/core/exchange/contributions.h"
#include "cc/core/servers/messages.h"
#include "cc/core/servers/wire.h"
#include "cc/core/servers/worker_step.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"
#include "cc/kernels/engine/batch_inputs.h"
#include "cc/kernels/exchange/exchange_plan.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/servers/plan_tensor.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace layoutmap {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;

template <typename Tid>
class PlanExchangeOp : public Kernel {
 public:
  explicit PlanExchangeOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    auto config = std::make_shared<ServersConfig>();
    OP_REQUIRES_OK(ctx, inputs_.Read(ctx));
    OP_REQUIRES_OK(ctx, ReadExchangeConfig(ctx, config.get()));
    OP_REQUIRES_OK(ctx, ToTf(HostEngine::Make(config->engine, &engine_)));
    config_ = std::move(config);
  }

  void Run(OpKernelContext* ctx) override {
    bool training;
    OP_REQUIRES_OK(ctx, GetScalar(ctx, "training", &training));
    std::shared_ptr<const Batch> batch;
    Status made;
    absl::Status error = inputs_.MakeBatch<Tid>(ctx, *engine_, &batch, &made);
    error.Update(ToTf(made));
    OP_REQUIRES_OK(ctx, OutputExchangePlan(ctx, config_, std::move(batch),
                                           training, error));
  }

 private:
  BatchInputs inputs_;
  std::shared_ptr<const ServersConfig> config_;
  // The engine only checks batches and runs no steps.
  std::unique_ptr<HostEngine> engine_;
};

class WriteRequestOp : public Kernel {
 public:
  explicit WriteRequestOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_shards", &num_shards_));
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor* input;
    OP_REQUIRES_OK(ctx, GetInput(ctx, "words", 1, &input));
    const auto words = View<uint32_t>(*input);
    FetchWriter writer;
    int64_t next = num_shards_;
    bool is_complete = words.size() >= next;
    for (int64_t shard = 0; is_complete && shard < num_shards_; ++shard) {
      const int64_t end = next + words[shard];
      is_complete = end <= words.size();
      if (!is_complete) break;
      writer.counts.push_back(words[shard]);
      RowWriter rows(&writer.rows);
      for (; next < end; ++next) rows.Add(words[next]);
    }
    OP_REQUIRES(
        ctx, is_complete && next == words.size(),
        absl::InvalidArgumentError(absl::StrCat(
            "`words` must be the number of rows of each of ", num_shards_,
            " shards, and then the rows. Received: ", words.size(), " words")));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(
                            "request", TensorShape({writer.size()}), &output));
    writer.Write(output->flat<uint8_t>().data());
  }

 private:
  int64_t num_shards_;
};

class ReadContributionsOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    const Tensor* words;
    OpOutputList ids, splits, weights;
    OP_REQUIRES_OK(ctx, GetInput(ctx, "words", 1, &words));
    OP_REQUIRES_OK(ctx, ctx->output_list("ids", &ids));
    OP_REQUIRES_OK(ctx, ctx->output_list("splits", &splits));
    OP_REQUIRES_OK(ctx, ctx->output_list("weights", &weights));
    std::vector<OwnedPart> parts(ids.size());
    // In a forward-only step, there are no words.
    if (words->NumElements() > 0) {
      OP_REQUIRES_OK(
          ctx, ToTf(ReadParts(View<uint32_t>(*words), ids.size(), &parts)));
    }
    std::vector<int64_t> num_samples;
    for (size_t f = 0; f < parts.size(); ++f) {
      std::vector<int64_t> part_splits = {0};
      for (const uint32_t count : parts[f].counts) {
        part_splits.push_back(part_splits.back() + count);
      }
      num_samples.push_back(static_cast<int64_t>(parts[f].counts.size()));
      OP_REQUIRES_OK(ctx, SetOutput<int64_t>(&ids, f, parts[f].rows));
      OP_REQUIRES_OK(ctx, SetOutput<int64_t>(&splits, f, part_splits));
      OP_REQUIRES_OK(ctx, SetOutput<float>(&weights, f, parts[f].gains));
    }
    OP_REQUIRES_OK(ctx, SetVector<int64_t>(ctx, "num_samples", num_samples));
  }
};

class SplitGradientsOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    std::shared_ptr<const WorkerStep> step;
    BatchGradients gradients;
    OpOutputList outputs;
    OP_REQUIRES_OK(ctx, GetPlan(ctx, &step));
    OP_REQUIRES_OK(ctx,
                   GetFeatureGradients(ctx, step->config().engine, &gradients));
    OP_REQUIRES_OK(ctx, ctx->output_list("values", &outputs));
    OP_REQUIRES_OK(ctx, CheckCount("num_owners", step->config().num_servers,
                                   outputs.size()));
    std::vector<std::vector<float>> values;
    OP_REQUIRES_OK(ctx, ToTf(SplitGradients(*step, gradients,
                                            TfParallelFor(ctx), &values)));
    for (size_t s = 0; s < values.size(); ++s) {
      OP_REQUIRES_OK(ctx, SetOutput<float>(&outputs, s, values[s]));
    }
  }
};

LM_REGISTER_ID_KERNELS("PlanExchange", PlanExchangeOp);
LM_REGISTER_KERNEL("WriteRequest", WriteRequestOp);
LM_REGISTER_KERNEL("ReadContributions", ReadContributionsOp);
LM_REGISTER_KERNEL("SplitGradients", SplitGradientsOp);

}  // namespace
}  // namespace layoutmap
