// A kernel that admits the keys of several processes to the shards of this
// process.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/exchange/key_requests.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/served_keys/key_messages.h"
#include "cc/core/served_keys/key_pieces.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/steps/step.h"
#include "cc/kernels/engine/engine_resource.h"
#include "cc/kernels/exchange/exchange_plan.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "cc/kernels/vocabulary/keys_op.h"
#include "cc/kernels/vocabulary/open_table_specs.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/tstring.h"

namespace layoutmap {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// Admits the keys that replicas have requested from the shards of this process.
class AdmitRequestsOp : public KeysOp {
 public:
  explicit AdmitRequestsOp(OpKernelConstruction* ctx) : KeysOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("request_tables", &request_tables_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("keeps_change", &options_.keeps_change));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_earlier", &options_.num_earlier));
    KeepUnknownKeys();
    for (const int32_t place : request_tables_) {
      OP_REQUIRES(
          ctx,
          place >= kNoShard && place < static_cast<int32_t>(specs().size()),
          absl::InvalidArgumentError(absl::StrCat(
              "`request_tables` must be -1 or indices into `open_tables`. "
              "Received: ",
              place)));
    }
  }

  void Run(OpKernelContext* ctx) override {
    EnginePtr resource;
    bool training;
    OpInputList inputs;
    std::vector<std::vector<PieceKeys>> requests;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &resource));
    OP_REQUIRES_OK(ctx, GetScalar(ctx, "training", &training));
    OP_REQUIRES_OK(ctx, ctx->input_list("requests", &inputs));
    for (const Tensor& one : inputs) {
      OP_REQUIRES_OK(
          ctx, ToTf(ReadKeyRequest(View<uint32_t>(one),
                                   static_cast<int64_t>(request_tables_.size()),
                                   &requests.emplace_back())));
    }
    EngineResource::TakeBack earlier = resource->RemoveTakeBack();
    if (options_.num_earlier == 0) earlier = nullptr;
    std::vector<std::vector<uint32_t>> rows(requests.size());
    std::vector<int64_t> steps(request_tables_.size());
    const absl::Status error =
        Admit(ctx, *resource, requests, training, &rows, &steps);
    if (error.ok()) {
      KeepBoth(*resource, std::move(earlier));
    } else {
      resource->KeepTakeBack(std::move(earlier));
      rows.assign(requests.size(), {});
      steps.assign(request_tables_.size(), 0);
      LockedShards none;
      OP_REQUIRES_OK(ctx,
                     OutputNoneEvicted(ctx, resource->engine().config(), none));
    }
    tensorflow::OpOutputList outputs;
    OP_REQUIRES_OK(ctx, ctx->output_list("rows", &outputs));
    for (size_t r = 0; r < rows.size(); ++r) {
      OP_REQUIRES_OK(ctx, SetOutput<uint32_t>(&outputs, r, rows[r]));
    }
    OP_REQUIRES_OK(ctx, SetVector<int64_t>(ctx, "steps", steps));
    OP_REQUIRES_OK(
        ctx, SetScalar(ctx, "error", tensorflow::tstring(error.message())));
  }

 private:
  // The value of `request_tables` for a table without a shard here.
  static constexpr int32_t kNoShard = -1;

  // Returns the tables of the engine, with one feature for each feature of a
  // request whose table has a shard here.
  EngineConfig ConfigOfRequests(const EngineConfig& engine) const {
    EngineConfig config;
    config.tables = engine.tables;
    for (const int32_t place : request_tables_) {
      if (place == kNoShard) continue;
      const int32_t table = specs()[place].table;
      FeatureSpec feature;
      feature.feature = engine.tables[table].name;
      feature.table = engine.tables[table].name;
      feature.num_rows = engine.tables[table].partition.num_rows();
      config.features.push_back(feature);
      config.table_of_feature.push_back(table);
    }
    return config;
  }

  absl::Status Admit(OpKernelContext* ctx, EngineResource& resource,
                     const std::vector<std::vector<PieceKeys>>& requests,
                     bool training, std::vector<std::vector<uint32_t>>* rows,
                     std::vector<int64_t>* steps) {
    const std::vector<TableSpec>& tables = resource.engine().config().tables;
    for (const OpenTableSpec& spec : specs()) {
      if (spec.table >= 0 && spec.table < static_cast<int>(tables.size())) {
        continue;
      }
      return absl::InvalidArgumentError(
          absl::StrCat("`open_tables` must be in [0, ", tables.size(),
                       "). Received: ", spec.table));
    }
    const EngineConfig config = ConfigOfRequests(resource.engine().config());
    // The features with a shard here, as indices into a request.
    std::vector<size_t> features;
    for (size_t f = 0; f < request_tables_.size(); ++f) {
      if (request_tables_[f] != kNoShard) features.push_back(f);
    }
    // Memory of the keys and of the splits. Each feature has one sample.
    std::deque<std::vector<int64_t>> memory;
    std::vector<std::vector<FeatureInput<int64_t>>> inputs(requests.size());
    for (size_t r = 0; r < requests.size(); ++r) {
      for (size_t f = 0; f < requests[r].size(); ++f) {
        const PieceKeys& keys = requests[r][f];
        TF_RETURN_IF_ERROR(CheckOwner(resource, f, keys.keys));
        if (request_tables_[f] == kNoShard) continue;
        FeatureInput<int64_t>& input = inputs[r].emplace_back();
        input.ids = memory.emplace_back(ExpandUses(keys));
        input.splits =
            memory.emplace_back(std::vector<int64_t>{0, input.ids.size()});
        input.num_samples = 1;
      }
    }
    return FindRowsOf(
        ctx, resource, config, inputs, training, options_,
        [&](const std::vector<std::shared_ptr<const Batch>>& batches,
            std::function<Status()>*) {
          for (size_t i = 0; i < features.size(); ++i) {
            (*steps)[features[i]] = (*batches[0])[i].vocabulary_step();
          }
          for (size_t r = 0; r < requests.size(); ++r) {
            for (size_t i = 0; i < features.size(); ++i) {
              const TableSpec& table = tables[config.table_of_feature[i]];
              CopyRows(
                  requests[r][features[i]], (*batches[r])[i].rows(),
                  table.partition.num_rows() / kKeysPerBucket * kKeysPerBucket,
                  &(*rows)[r]);
            }
          }
          return absl::OkStatus();
        });
  }

  // Returns an error if a key belongs to another shard.
  absl::Status CheckOwner(EngineResource& resource, size_t feature,
                          Span<const int64_t> keys) const {
    if (request_tables_[feature] == kNoShard) {
      if (keys.empty()) return absl::OkStatus();
      return absl::InvalidArgumentError(
          "`requests` must not have keys of tables without a shard in this "
          "process");
    }
    const OpenTableSpec& spec = specs()[request_tables_[feature]];
    const TableSpec& table = resource.engine().config().tables[spec.table];
    const int64_t total = resource.vocabulary_buckets(spec.table);
    if (total == 0) return absl::OkStatus();
    KeyPiece piece;
    piece.table = table.name;
    TF_RETURN_IF_ERROR(ToTf(BucketLayout::Make(total, &piece.layout)));
    piece.first_bucket = table.first_row / kKeysPerBucket;
    piece.num_buckets = table.partition.num_rows() / kKeysPerBucket;
    return ToTf(CheckKeysOf(piece, keys));
  }

  // Appends the row of each unique key. `of_uses` are the rows of all uses. A
  // key without a row has a row of at least `num_rows`.
  static void CopyRows(const PieceKeys& keys, Span<const uint32_t> of_uses,
                       int64_t num_rows, std::vector<uint32_t>* rows) {
    int64_t next = 0;
    for (const uint32_t times : keys.times) {
      rows->push_back(of_uses[next] < num_rows ? of_uses[next] : kNoPlace);
      next += times;
    }
  }

  // Stores one function that undoes the last change and then the earlier
  // changes.
  static void KeepBoth(EngineResource& resource,
                       EngineResource::TakeBack earlier) {
    EngineResource::TakeBack latest = resource.RemoveTakeBack();
    if (!latest || !earlier) {
      resource.KeepTakeBack(latest ? std::move(latest) : std::move(earlier));
      return;
    }
    resource.KeepTakeBack([latest = std::move(latest),
                           earlier = std::move(earlier)](OpKernelContext* ctx) {
      TF_RETURN_IF_ERROR(latest(ctx));
      return earlier(ctx);
    });
  }

  std::vector<int32_t> request_tables_;
  AdmissionOptions options_;
};

LM_REGISTER_KERNEL("AdmitRequests", AdmitRequestsOp);

}  // namespace
}  // namespace layoutmap
