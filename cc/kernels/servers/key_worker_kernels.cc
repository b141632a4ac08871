// Kernels that a worker runs for steps on tables with open vocabularies. They
// create the requests and read the rows of the keys from the responses.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/served_keys/key_step.h"
#include "cc/core/servers/applied_closures.h"
#include "cc/core/servers/messages.h"
#include "cc/core/servers/worker_step.h"
#include "cc/kernels/engine/batch_inputs.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/servers/plan_tensor.h"
#include "cc/kernels/servers/worker_messages.h"
#include "cc/kernels/vocabulary/locked_vocabulary.h"
#include "cc/kernels/vocabulary/open_table_specs.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_tensor_data.h"

namespace layoutmap {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// A KeyStep in a variant tensor, which is used in the same way as PlanTensor.
struct KeyPlanTensor {
  std::shared_ptr<const KeyStep> step;

  static std::string TypeName() { return "LayoutMap>KeyStep"; }
  std::string DebugString() const { return TypeName(); }
  void Encode(tensorflow::VariantTensorData* data) const {}
  bool Decode(const tensorflow::VariantTensorData& data) { return false; }
};

class PlanKeysOp : public Kernel {
 public:
  explicit PlanKeysOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    auto servers = std::make_shared<ServersConfig>();
    auto config = std::make_shared<KeysConfig>();
    std::vector<OpenTable> tables;
    OP_REQUIRES_OK(ctx, ReadServersConfig(ctx, servers.get()));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("training", &training_));
    OP_REQUIRES_OK(ctx, ReadOpenTables(ctx, servers->engine.tables.size(),
                                       &open_tables_, &tables));
    OP_REQUIRES_OK(ctx, ToTf(MakeKeysConfig(std::move(servers),
                                            std::move(tables), config.get())));
    config_ = std::move(config);
  }

  void Run(OpKernelContext* ctx) override {
    std::vector<FeatureInput<int64_t>> inputs;
    ClosureToken token;
    KeyPlanTensor plan;
    Requests requests;
    std::vector<KeyKind> read_kinds;
    std::vector<uint32_t> kinds(config_->tables.size());
    OP_REQUIRES_OK(ctx, ReadKeyKinds(ctx, open_tables_.size(), &read_kinds));
    for (size_t i = 0; i < read_kinds.size(); ++i) {
      kinds[open_tables_[i]] = static_cast<uint32_t>(read_kinds[i]);
    }
    OP_REQUIRES_OK(ctx, ReadFeatureInputs(ctx, &inputs));
    OP_REQUIRES_OK(ctx, GetTokenOfLookup(ctx, &token));
    OP_REQUIRES_OK(ctx, ToTf(KeyStep::Make(config_, inputs, TfParallelFor(ctx),
                                           &plan.step)));
    OP_REQUIRES_OK(ctx, requests.Get(ctx));
    OP_REQUIRES_OK(ctx, requests.Result(plan.step->Request(
                            token, training_, kinds, requests.allocate())));
    OP_REQUIRES_OK(
        ctx, SetScalar(ctx, "plan", tensorflow::Variant(std::move(plan))));
  }

 private:
  // Reads the input `token`, which can end with the index of the lookup.
  static absl::Status GetTokenOfLookup(OpKernelContext* ctx,
                                       ClosureToken* token) {
    const Tensor* tensor;
    TF_RETURN_IF_ERROR(GetInput(ctx, "token", 1, &tensor));
    if (tensor->NumElements() != 4) return GetToken(ctx, token);
    const auto values = tensor->vec<int64_t>();
    *token = {values(0), values(1), values(2), values(3)};
    if (token->call >= 0) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("`token` must have an index of a lookup that is not "
                     "negative. Received: ",
                     token->call));
  }

  std::shared_ptr<const KeysConfig> config_;
  // Indices of the tables with an open vocabulary.
  std::vector<int32_t> open_tables_;
  bool training_ = false;
};

absl::Status GetKeyPlan(const Tensor& tensor,
                        std::shared_ptr<const KeyStep>* step) {
  const auto* plan =
      tensor.scalar<tensorflow::Variant>()().get<KeyPlanTensor>();
  if (plan == nullptr || plan->step == nullptr) {
    return absl::InvalidArgumentError(
        "`plan` must be an output of `PlanKeys` in the same process");
  }
  *step = plan->step;
  return absl::OkStatus();
}

class PlaceKeysOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    const Tensor* tensor;
    Fetched fetched;
    PlanTensor placed;
    std::shared_ptr<const KeyStep> plan;
    OP_REQUIRES_OK(ctx, GetInput(ctx, "plan", 0, &tensor));
    OP_REQUIRES_OK(ctx, fetched.Get(ctx));
    OP_REQUIRES_OK(ctx, GetKeyPlan(*tensor, &plan));
    OP_REQUIRES_OK(ctx, ToTf(plan->Place(fetched.bytes(), TfParallelFor(ctx),
                                         &placed.step)));
    OP_REQUIRES_OK(
        ctx, SetScalar(ctx, "placed", tensorflow::Variant(std::move(placed))));
  }
};

class JoinKeysOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Run(OpKernelContext* ctx) override {
    const Tensor* tensor;
    Fetched fetched;
    std::shared_ptr<const KeyStep> plan;
    std::vector<KeyStep::Lookup> lookups;
    PlanTensor placed;
    OP_REQUIRES_OK(ctx, GetInput(ctx, "plan", 0, &tensor));
    OP_REQUIRES_OK(ctx, GetKeyPlan(*tensor, &plan));
    OP_REQUIRES_OK(ctx, fetched.Get(ctx));
    OP_REQUIRES_OK(ctx, ReadLookups(ctx, fetched.bytes(), &lookups));
    OP_REQUIRES_OK(ctx, ToTf(plan->PlaceJoined(lookups, TfParallelFor(ctx),
                                               &placed.step)));
    OP_REQUIRES_OK(ctx, WriteJoined(ctx, plan->JoinedSizes(*placed.step),
                                    lookups[0].fetched));
    OP_REQUIRES_OK(
        ctx, SetScalar(ctx, "placed", tensorflow::Variant(std::move(placed))));
  }

 private:
  static absl::Status ReadLookups(
      OpKernelContext* ctx, const std::vector<Span<const uint8_t>>& fetched,
      std::vector<KeyStep::Lookup>* lookups) {
    tensorflow::OpInputList plans;
    TF_RETURN_IF_ERROR(ctx->input_list("lookups", &plans));
    lookups->resize(plans.size());
    const size_t per_lookup = fetched.size() / lookups->size();
    if (per_lookup * lookups->size() != fetched.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "`fetched` must have one tensor per server for each of ",
          lookups->size(), " lookups. Received: ", fetched.size()));
    }
    auto next = fetched.begin();
    for (size_t c = 0; c < lookups->size(); ++c) {
      KeyStep::Lookup& lookup = (*lookups)[c];
      TF_RETURN_IF_ERROR(CheckRank("lookups", plans[c], 0));
      TF_RETURN_IF_ERROR(GetKeyPlan(plans[c], &lookup.step));
      lookup.fetched.assign(next, next + per_lookup);
      next += per_lookup;
    }
    return absl::OkStatus();
  }

  // Writes the header of `fetched`, followed by zeros.
  static absl::Status WriteJoined(
      OpKernelContext* ctx, const std::vector<int64_t>& sizes,
      const std::vector<Span<const uint8_t>>& fetched) {
    tensorflow::OpOutputList joined;
    TF_RETURN_IF_ERROR(ctx->output_list("joined", &joined));
    if (joined.size() != static_cast<int>(sizes.size())) {
      return absl::InvalidArgumentError(
          absl::StrCat("`num_servers` must be ", sizes.size(),
                       ". Received: ", joined.size()));
    }
    for (size_t s = 0; s < sizes.size(); ++s) {
      Tensor* output = nullptr;
      TF_RETURN_IF_ERROR(joined.allocate(
          static_cast<int>(s), tensorflow::TensorShape({sizes[s]}), &output));
      uint8_t* const bytes = output->flat<uint8_t>().data();
      std::copy_n(fetched[s].data(), kFetchedHeader, bytes);
      std::fill(bytes + kFetchedHeader, bytes + sizes[s], 0);
    }
    return absl::OkStatus();
  }
};

LM_REGISTER_KERNEL("PlanKeys", PlanKeysOp);
LM_REGISTER_KERNEL("PlaceKeys", PlaceKeysOp);
LM_REGISTER_KERNEL("JoinKeys", JoinKeysOp);

}  // namespace
}  // namespace layoutmap
