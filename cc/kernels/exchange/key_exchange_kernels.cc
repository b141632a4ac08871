// Kernels of a process that looks up keys in tables that are sharded over
// processes. They write the requests to the owners of keys, and plan the step
// with the rows that the owners return.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/exchange/key_requests.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/served_keys/key_step.h"
#include "cc/core/servers/worker_step.h"
#include "cc/core/steps/step.h"
#include "cc/kernels/engine/batch_inputs.h"
#include "cc/kernels/exchange/exchange_plan.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/vocabulary/open_table_specs.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/platform/tstring.h"

namespace layoutmap {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Base class of ops whose inputs are a batch of keys.
class KeyExchangeOp : public Kernel {
 public:
  explicit KeyExchangeOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    auto servers = std::make_shared<ServersConfig>();
    auto config = std::make_shared<KeysConfig>();
    std::vector<int32_t> numbers;
    std::vector<OpenTable> tables;
    OP_REQUIRES_OK(ctx, ReadExchangeConfig(ctx, servers.get()));
    OP_REQUIRES_OK(ctx, ReadOpenTables(ctx, servers->engine.tables.size(),
                                       &numbers, &tables));
    OP_REQUIRES_OK(ctx, ToTf(MakeKeysConfig(std::move(servers),
                                            std::move(tables), config.get())));
    config_ = std::move(config);
  }

 protected:
  const std::shared_ptr<const KeysConfig>& config() const { return config_; }

  // Finds the keys of the batch. Returns an error if the batch is invalid.
  absl::Status MakeRequests(OpKernelContext* ctx, KeyRequests* requests) const {
    std::vector<FeatureInput<int64_t>> inputs;
    TF_RETURN_IF_ERROR(ReadFeatureInputs(ctx, &inputs));
    return ToTf(
        KeyRequests::Make(config_, inputs, TfParallelFor(ctx), requests));
  }

 private:
  std::shared_ptr<const KeysConfig> config_;
};

class RequestKeysOp : public KeyExchangeOp {
 public:
  using KeyExchangeOp::KeyExchangeOp;

  void Run(OpKernelContext* ctx) override {
    KeyRequests requests;
    const absl::Status error = MakeRequests(ctx, &requests);
    const auto num_owners = static_cast<size_t>(config()->servers->num_servers);
    std::vector<std::vector<uint32_t>> words(num_owners);
    std::vector<int64_t> num_keys(num_owners);
    if (error.ok()) {
      words = requests.Write();
      num_keys = requests.NumKeys();
    }
    OpOutputList outputs;
    OP_REQUIRES_OK(ctx, ctx->output_list("requests", &outputs));
    Tensor* sizes = nullptr;
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(
                 "sizes", TensorShape({static_cast<int64_t>(num_owners), 2}),
                 &sizes));
    for (size_t s = 0; s < num_owners; ++s) {
      OP_REQUIRES_OK(ctx, SetOutput<uint32_t>(&outputs, s, words[s]));
      sizes->matrix<int64_t>()(static_cast<int64_t>(s), 0) =
          static_cast<int64_t>(words[s].size());
      sizes->matrix<int64_t>()(static_cast<int64_t>(s), 1) = num_keys[s];
    }
    OP_REQUIRES_OK(
        ctx, SetScalar(ctx, "error", tensorflow::tstring(error.message())));
  }
};

class PlanKeyExchangeOp : public KeyExchangeOp {
 public:
  using KeyExchangeOp::KeyExchangeOp;

  void Run(OpKernelContext* ctx) override {
    KeyRequests requests;
    OpInputList inputs;
    bool has_contributions = false;
    std::shared_ptr<const Batch> batch;
    OP_REQUIRES_OK(ctx, GetScalar(ctx, "training", &has_contributions));
    OP_REQUIRES_OK(ctx, ctx->input_list("rows", &inputs));
    std::vector<Span<const uint32_t>> rows;
    for (const Tensor& one : inputs) rows.push_back(View<uint32_t>(one));
    absl::Status error = MakeRequests(ctx, &requests);
    if (error.ok()) error = ToTf(requests.Place(rows, &batch));
    OP_REQUIRES_OK(ctx,
                   OutputExchangePlan(ctx, config()->servers, std::move(batch),
                                      has_contributions, error));
  }
};

LM_REGISTER_KERNEL("RequestKeys", RequestKeysOp);
LM_REGISTER_KERNEL("PlanKeyExchange", PlanKeyExchangeOp);

}  // namespace
}  // namespace layoutmap
