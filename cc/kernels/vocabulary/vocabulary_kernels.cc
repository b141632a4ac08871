// Kernels that access one vocabulary without running a step of the engine.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/views.h"
#include "cc/core/engine/key_batches.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/find_keys.h"
#include "cc/core/keys/first_values.h"
#include "cc/core/keys/policy.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/core/vocabulary/admit_keys.h"
#include "cc/core/vocabulary/evict_keys.h"
#include "cc/kernels/changes/row_values.h"
#include "cc/kernels/engine/engine_resource.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "cc/kernels/vocabulary/kept_changes.h"
#include "cc/kernels/vocabulary/locked_first_rows.h"
#include "cc/kernels/vocabulary/locked_vocabulary.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"

namespace layoutmap {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

class FindKeysOp : public Kernel {
 public:
  explicit FindKeysOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table", &table_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("first_bucket", &first_bucket_));
    OP_REQUIRES_OK(ctx,
                   ctx->GetAttr("vocabulary_buckets", &vocabulary_buckets_));
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor* keys;
    RowPartition partition;
    HeldBuckets buckets;
    OP_REQUIRES_OK(ctx, ctx->input("keys", &keys));
    OP_REQUIRES_OK(ctx, GetPartition(ctx, Placement::kOffsets, &partition));
    OP_REQUIRES_OK(ctx, buckets.Make(table_, partition.offsets(), first_bucket_,
                                     vocabulary_buckets_));
    LockedShards locked;
    OP_REQUIRES_OK(ctx,
                   locked.Lock(ctx, {"shards"}, LockedShards::Mode::kShared));
    ShardedView<const int64_t> stored;
    OP_REQUIRES_OK(ctx, locked.View(0, table_ + " (keys)", buckets.own,
                                    {kKeysPerBucket}, &stored));
    buckets.Place(&stored);
    Tensor* rows = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("rows", keys->shape(), &rows));
    const auto all = View<int64_t>(*keys);
    if (!buckets.is_shard) {
      FindKeys(buckets.layout, stored, all, TfParallelFor(ctx),
               MutableView<int64_t>(rows));
      return;
    }
    std::vector<int64_t> own, positions;
    for (int64_t i = 0; i < all.size(); ++i) {
      if (!buckets.Has(all[i])) continue;
      own.push_back(all[i]);
      positions.push_back(i);
    }
    std::vector<int64_t> found(own.size());
    FindKeys(buckets.layout, stored, own, TfParallelFor(ctx),
             Span<int64_t>(found));
    const Span<int64_t> out = MutableView<int64_t>(rows);
    std::fill(out.begin(), out.end(), kNoRow);
    for (size_t i = 0; i < found.size(); ++i) out[positions[i]] = found[i];
  }

 private:
  std::string table_;
  int64_t first_bucket_ = 0;
  int64_t vocabulary_buckets_ = 0;
};

class EvictKeysOp : public Kernel {
 public:
  explicit EvictKeysOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    std::string admission, evict;
    std::vector<int64_t> numbers;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table", &table_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("sharing", &sharing_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("expired", &expired_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("admission", &admission));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("evict", &evict));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("policy", &numbers));
    OP_REQUIRES_OK(ctx, ReadPolicy(admission, evict, numbers, 0, &policy_));
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor* keys;
    EnginePtr resource;
    OP_REQUIRES_OK(ctx, ctx->input("keys", &keys));
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &resource));
    const std::vector<TableSpec>& tables = resource->engine().config().tables;
    std::vector<int32_t> sharing = {table_};
    sharing.insert(sharing.end(), sharing_.begin(), sharing_.end());
    for (const int32_t one : sharing) {
      OP_REQUIRES(ctx, one >= 0 && one < static_cast<int32_t>(tables.size()),
                  absl::InvalidArgumentError(
                      absl::StrCat("`table` and `sharing` must be in [0, ",
                                   tables.size(), "). Received: ", one)));
      OP_REQUIRES(
          ctx,
          tables[one].partition.num_rows() ==
              tables[table_].partition.num_rows(),
          absl::InvalidArgumentError(absl::StrCat(
              "Tables that share a vocabulary must have the same number of "
              "rows. Received: ",
              tables[one].partition.num_rows(), " (table '", tables[one].name,
              "')")));
    }
    const TableSpec& table = tables[table_];
    LockedShards locked;
    LockedVocabulary vocabulary;
    OP_REQUIRES_OK(ctx, locked.Lock(ctx, {"state", "shards", "slots"},
                                    LockedShards::Mode::kExclusive));
    OP_REQUIRES_OK(
        ctx, vocabulary.Make(ctx, &locked, 0, table,
                             resource->vocabulary_buckets(table_), policy_));
    std::vector<KeyOfRow> evicted;
    OP_REQUIRES_OK(ctx, Evict(*resource, sharing, vocabulary,
                              View<int64_t>(*keys), &evicted));
    const absl::Status told = CatchAllTf([&] {
      return SetOutputs(ctx, locked, tables, sharing,
                        vocabulary.buckets().first_row(), evicted);
    });
    if (!told.ok()) TakeBackEvicted(evicted, vocabulary.state());
    OP_REQUIRES_OK(ctx, told);
    const Span<int64_t> numbers = vocabulary.numbers();
    KeptChange change;
    change.table = table_;
    change.policy = policy_;
    change.numbers_before.assign(numbers.begin(), numbers.end());
    const auto num_evicted = static_cast<int64_t>(evicted.size());
    vocabulary.CountEvicted(num_evicted, expired_ ? num_evicted : 0);
    change.numbers_after.assign(numbers.begin(), numbers.end());
    for (const KeyOfRow& one : evicted) {
      change.touched.push_back(one.row - vocabulary.buckets().first_row());
    }
    resource->changed().Note(table_, change.touched);
    // Only the keys must be restored, because rows keep their values until they
    // are assigned to other keys.
    change.restore = [evicted](const VocabularyState& state) {
      TakeBackEvicted(evicted, state);
    };
    KeepChanges(resource.get(), {change}, nullptr);
  }

 private:
  // Evicts the requested keys or the expired keys. The caller must hold the
  // locks of the vocabulary, so that no step can assign a row during this call.
  absl::Status Evict(EngineResource& resource,
                     const std::vector<int32_t>& sharing,
                     const LockedVocabulary& vocabulary,
                     Span<const int64_t> keys,
                     std::vector<KeyOfRow>* evicted) const {
    const HeldBuckets& buckets = vocabulary.buckets();
    RowsInFlight in_flight = FindRowsInFlightOf(
        resource.engine(), resource.tokens(), resource.row_steps(), sharing);
    for (int64_t& row : in_flight.pinned_rows) row += buckets.first_row();
    VocabularyStep step;
    TF_RETURN_IF_ERROR(vocabulary.NextStep(&step.number));
    step.oldest_in_flight = in_flight.oldest_step;
    step.pinned_rows = in_flight.pinned_rows;
    if (!expired_ && buckets.is_shard) {
      std::vector<int64_t> own;
      for (const int64_t key : keys) {
        if (buckets.Has(key)) own.push_back(key);
      }
      return ToTf(EvictKeys(vocabulary.layout(), step, own, vocabulary.state(),
                            evicted));
    }
    if (!expired_) {
      return ToTf(EvictKeys(vocabulary.layout(), step, keys, vocabulary.state(),
                            evicted));
    }
    EvictExpired(vocabulary.layout(), vocabulary.policy(), step,
                 vocabulary.state(), evicted);
    return absl::OkStatus();
  }

  static absl::Status SetOutputs(OpKernelContext* ctx,
                                 const LockedShards& locked,
                                 const std::vector<TableSpec>& tables,
                                 const std::vector<int32_t>& sharing,
                                 int64_t first_row,
                                 const std::vector<KeyOfRow>& evicted) {
    OpInputList state, shards, slots;
    OutputsInOrder outputs;
    std::vector<int64_t> keys, rows;
    for (const KeyOfRow& one : evicted) {
      keys.push_back(one.key);
      rows.push_back(one.row - first_row);
    }
    TF_RETURN_IF_ERROR(ctx->input_list("state", &state));
    TF_RETURN_IF_ERROR(ctx->input_list("shards", &shards));
    TF_RETURN_IF_ERROR(ctx->input_list("slots", &slots));
    int num_shards = 0, num_slots = 0;
    for (const int32_t one : sharing) {
      const int here = tables[one].partition.num_shards();
      num_shards += here;
      num_slots += here * static_cast<int>(NumSlots(tables[one].optimizer));
    }
    TF_RETURN_IF_ERROR(CheckNumVariables("The tables need", "shards",
                                         num_shards, shards.size()));
    TF_RETURN_IF_ERROR(
        CheckNumVariables("The tables need", "slots", num_slots, slots.size()));
    TF_RETURN_IF_ERROR(outputs.Start(ctx, "values"));
    int first_shard = state.size(), first_slot = first_shard + num_shards;
    for (const int32_t one : sharing) {
      const TableSpec& table = tables[one];
      TF_RETURN_IF_ERROR(CopyRows(ctx, locked, first_shard, first_slot, table,
                                  rows, &outputs));
      const int here = table.partition.num_shards();
      first_shard += here;
      first_slot += here * static_cast<int>(NumSlots(table.optimizer));
    }
    TF_RETURN_IF_ERROR(outputs.Finish());
    return SetVector<int64_t>(ctx, "evicted", keys);
  }

  VocabularyPolicy policy_;
  int32_t table_;
  // Other tables with the same vocabulary.
  std::vector<int32_t> sharing_;
  bool expired_;
};

class FirstRowsOp : public Kernel {
 public:
  explicit FirstRowsOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    std::string kind;
    std::vector<float> limits;
    int64_t seed;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("kind", &kind));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("limits", &limits));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("seed", &seed));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dim", &dim_));
    OP_REQUIRES(
        ctx, limits.size() == 2,
        absl::InvalidArgumentError(absl::StrCat(
            "`limits` must have two values. Received: ", limits.size())));
    OP_REQUIRES_OK(ctx, ToTf(ParseFirstValues(kind, &values_.kind)));
    values_.a = limits[0];
    values_.b = limits[1];
    values_.seed = static_cast<uint64_t>(seed);
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor* keys;
    OP_REQUIRES_OK(ctx, ctx->input("keys", &keys));
    tensorflow::TensorShape shape = keys->shape();
    OP_REQUIRES_OK(ctx, shape.AddDimWithStatus(dim_));
    Tensor* rows = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("rows", shape, &rows));
    float* out = rows->flat<float>().data();
    const Span<const int64_t> of = View<int64_t>(*keys);
    TfParallelFor(ctx)(
        of.size(), 20 * dim_ + 20, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            FillFirstValues(values_, of[i], {out + i * dim_, dim_});
          }
        });
  }

 private:
  FirstValues values_;
  int64_t dim_;
};

LM_REGISTER_KERNEL("FindKeys", FindKeysOp);
LM_REGISTER_KERNEL("EvictKeys", EvictKeysOp);
LM_REGISTER_KERNEL("FirstRows", FirstRowsOp);

}  // namespace
}  // namespace layoutmap
