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
#include "cc/kernels/engine/engine_config_reader.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/servers/plan_tensor.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/platform/tstring.h"

namespace layoutmap {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;

template <typename T, typename U>
absl::Status SetOutput(OpOutputList* outputs, size_t i,
                       const std::vector<U>& values) {
  Tensor* output = nullptr;
  TF_RETURN_IF_ERROR(outputs->allocate(
      static_cast<int>(i), TensorShape({static_cast<int64_t>(values.size())}),
      &output));
  std::copy(values.begin(), values.end(), output->flat<T>().data());
  return absl::OkStatus();
}

// The columns of the output `sizes`.
enum Size { kRequest, kContributions, kFetched, kGradients, kNumSizes };

// Computes the output `sizes`, which has one row per owner. Returns the values
// row by row.
std::vector<int64_t> MessageSizes(
    const ServersConfig& config,
    const std::vector<std::vector<uint32_t>>& requests,
    const OwnedParts& parts) {
  std::vector<int64_t> sizes(requests.size() * kNumSizes);
  std::vector<size_t> next(requests.size());
  for (size_t s = 0; s < requests.size(); ++s) {
    sizes[s * kNumSizes + kRequest] = static_cast<int64_t>(requests[s].size());
    sizes[s * kNumSizes + kFetched] = kFetchedHeader / sizeof(float);
    for (size_t f = 0; f < parts[s].size(); ++f) {
      sizes[s * kNumSizes + kGradients] +=
          static_cast<int64_t>(parts[s][f].outputs.size()) *
          config.engine.dim_of_feature(f);
    }
  }
  auto owner = config.server_of_shard.begin();
  for (const TableSpec& table : config.engine.tables) {
    for (int32_t shard = 0; shard < table.partition.num_shards(); ++shard) {
      const int32_t s = *owner++;
      sizes[s * kNumSizes + kFetched] += requests[s][next[s]++] * table.dim;
    }
  }
  return sizes;
}

template <typename Tid>
class PlanExchangeOp : public Kernel {
 public:
  explicit PlanExchangeOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    auto config = std::make_shared<ServersConfig>();
    OP_REQUIRES_OK(ctx, inputs_.Read(ctx));
    OP_REQUIRES_OK(ctx, ReadEngineConfig(ctx, &config->engine));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_owners", &config->num_servers));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shard_owners", &config->server_of_shard));
    OP_REQUIRES_OK(ctx, ToTf(CheckServersConfig(*config)));
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
    PlanTensor plan;
    const auto num_owners = static_cast<size_t>(config_->num_servers);
    std::vector<std::vector<uint32_t>> requests(num_owners);
    std::vector<std::vector<uint32_t>> contributions(num_owners);
    std::vector<int64_t> sizes(num_owners * kNumSizes);
    if (error.ok()) {
      const ParallelFor parallel_for = TfParallelFor(ctx);
      plan.step = WorkerStep::Make(config_, std::move(batch), parallel_for);
      requests = plan.step->RowsByServer();
      OwnedParts parts(num_owners);
      if (training) {
        parts = SplitBatch(*plan.step, parallel_for);
        for (size_t s = 0; s < num_owners; ++s) {
          contributions[s] = WriteParts(parts[s]);
        }
      }
      sizes = MessageSizes(*config_, requests, parts);
      for (size_t s = 0; s < num_owners; ++s) {
        sizes[s * kNumSizes + kContributions] =
            static_cast<int64_t>(contributions[s].size());
      }
    }
    OpOutputList request_outputs, contribution_outputs;
    OP_REQUIRES_OK(ctx, ctx->output_list("requests", &request_outputs));
    OP_REQUIRES_OK(ctx,
                   ctx->output_list("contributions", &contribution_outputs));
    for (size_t s = 0; s < num_owners; ++s) {
      OP_REQUIRES_OK(ctx,
                     SetOutput<uint32_t>(&request_outputs, s, requests[s]));
      OP_REQUIRES_OK(
          ctx, SetOutput<uint32_t>(&contribution_outputs, s, contributions[s]));
    }
    Tensor* sizes_output = nullptr;
    OP_REQUIRES_OK(
        ctx,
        ctx->allocate_output(
            "sizes", TensorShape({static_cast<int64_t>(num_owners), kNumSizes}),
            &sizes_output));
    std::copy(sizes.begin(), sizes.end(), sizes_output->flat<int64_t>().data());
    OP_REQUIRES_OK(
        ctx, SetScalar(ctx, "error", tensorflow::tstring(error.message())));
    OP_REQUIRES_OK(
        ctx, SetScalar(ctx, "plan", tensorflow::Variant(std::move(plan))));
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
