#include "cc/kernels/exchange/exchange_plan.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "cc/core/exchange/contributions.h"
#include "cc/core/servers/messages.h"
#include "cc/core/servers/worker_step.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"
#include "cc/kernels/engine/engine_config_reader.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/servers/plan_tensor.h"
#include "tensorflow/core/framework/op_kernel.h"
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

}  // namespace

absl::Status ReadExchangeConfig(OpKernelConstruction* ctx,
                                ServersConfig* config) {
  TF_RETURN_IF_ERROR(ReadEngineConfig(ctx, &config->engine));
  TF_RETURN_IF_ERROR(ctx->GetAttr("num_owners", &config->num_servers));
  TF_RETURN_IF_ERROR(ctx->GetAttr("shard_owners", &config->server_of_shard));
  return ToTf(CheckServersConfig(*config));
}

absl::Status OutputExchangePlan(OpKernelContext* ctx,
                                std::shared_ptr<const ServersConfig> config,
                                std::shared_ptr<const Batch> batch,
                                bool has_contributions,
                                const absl::Status& error) {
  PlanTensor plan;
  const auto num_owners = static_cast<size_t>(config->num_servers);
  std::vector<std::vector<uint32_t>> requests(num_owners);
  std::vector<std::vector<uint32_t>> contributions(num_owners);
  std::vector<int64_t> sizes(num_owners * kNumSizes);
  if (error.ok()) {
    const ParallelFor parallel_for = TfParallelFor(ctx);
    plan.step = WorkerStep::Make(config, std::move(batch), parallel_for);
    requests = plan.step->RowsByServer();
    OwnedParts parts(num_owners);
    if (has_contributions) {
      parts = SplitBatch(*plan.step, parallel_for);
      for (size_t s = 0; s < num_owners; ++s) {
        contributions[s] = WriteParts(parts[s]);
      }
    }
    sizes = MessageSizes(*config, requests, parts);
    for (size_t s = 0; s < num_owners; ++s) {
      sizes[s * kNumSizes + kContributions] =
          static_cast<int64_t>(contributions[s].size());
    }
  }
  OpOutputList request_outputs, contribution_outputs;
  TF_RETURN_IF_ERROR(ctx->output_list("requests", &request_outputs));
  TF_RETURN_IF_ERROR(ctx->output_list("contributions", &contribution_outputs));
  for (size_t s = 0; s < num_owners; ++s) {
    TF_RETURN_IF_ERROR(SetOutput<uint32_t>(&request_outputs, s, requests[s]));
    TF_RETURN_IF_ERROR(
        SetOutput<uint32_t>(&contribution_outputs, s, contributions[s]));
  }
  Tensor* sizes_output = nullptr;
  TF_RETURN_IF_ERROR(ctx->allocate_output(
      "sizes", TensorShape({static_cast<int64_t>(num_owners), kNumSizes}),
      &sizes_output));
  std::copy(sizes.begin(), sizes.end(), sizes_output->flat<int64_t>().data());
  TF_RETURN_IF_ERROR(
      SetScalar(ctx, "error", tensorflow::tstring(error.message())));
  return SetScalar(ctx, "plan", tensorflow::Variant(std::move(plan)));
}

}  // namespace layoutmap
