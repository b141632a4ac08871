#include "cc/kernels/vocabulary/kept_changes.h"

#include <algorithm>
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
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/steps/engine_config.h"
#include "cc/kernels/changes/row_values.h"
#include "cc/kernels/engine/engine_resource.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "cc/kernels/vocabulary/locked_vocabulary.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"

namespace layoutmap {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

absl::Status TakeBack(OpKernelContext* ctx, EngineResource* engine,
                      const std::vector<KeptChange>& changes,
                      const std::function<Status()>& forget_step) {
  const std::vector<TableSpec>& tables = engine->engine().config().tables;
  LockedShards locked;
  TF_RETURN_IF_ERROR(locked.Lock(ctx, {"state", "shards", "slots"},
                                 LockedShards::Mode::kExclusive));
  std::deque<LockedVocabulary> vocabularies(changes.size());
  int first_shard = 0;
  for (size_t i = 0; i < changes.size(); ++i) {
    const KeptChange& change = changes[i];
    if (!change.owns_vocabulary) continue;
    const TableSpec& table = tables[change.table];
    TF_RETURN_IF_ERROR(vocabularies[i].Make(
        ctx, &locked, first_shard, table,
        engine->vocabulary_buckets(change.table), change.policy));
    first_shard +=
        NumStateVariables(change.policy, table.partition.num_shards());
    const Span<int64_t> numbers = vocabularies[i].numbers();
    if (!std::equal(numbers.begin(), numbers.end(),
                    change.numbers_after.begin(), change.numbers_after.end())) {
      return absl::FailedPreconditionError(
          absl::StrCat("another call has changed the vocabulary of table '",
                       table.name, "' since"));
    }
  }
  if (forget_step) TF_RETURN_IF_ERROR(ToTf(forget_step()));
  int first_slot = first_shard;
  for (const KeptChange& change : changes) {
    first_slot += tables[change.table].partition.num_shards();
  }
  for (size_t i = 0; i < changes.size(); ++i) {
    const KeptChange& change = changes[i];
    const TableSpec& table = tables[change.table];
    TF_RETURN_IF_ERROR(RestoreRows(ctx, &locked, first_shard, first_slot, table,
                                   change.overwritten, change.values));
    const int num_shards = table.partition.num_shards();
    first_shard += num_shards;
    first_slot += num_shards * static_cast<int>(NumSlots(table.optimizer));
  }
  for (size_t i = 0; i < changes.size(); ++i) {
    const KeptChange& change = changes[i];
    if (change.owns_vocabulary) {
      change.restore(vocabularies[i].state());
      std::copy(change.numbers_before.begin(), change.numbers_before.end(),
                vocabularies[i].numbers().begin());
    }
    engine->changed().Note(change.table, change.touched);
  }
  return absl::OkStatus();
}

class TakeBackKeysOp : public Kernel {
 public:
  explicit TakeBackKeysOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("raises", &raises_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("in_processes", &in_processes_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("may_be_missing", &may_be_missing_));
  }

  void Run(OpKernelContext* ctx) override {
    EnginePtr engine;
    tensorflow::tstring why;
    OP_REQUIRES_OK(ctx, GetEngine(ctx, &engine));
    OP_REQUIRES_OK(ctx, GetScalar(ctx, "why", &why));
    const EngineResource::TakeBack take_back = engine->RemoveTakeBack();
    if (why.empty()) return;
    if (in_processes_) {
      engine->engine().Poison(why);
    } else if (take_back || !may_be_missing_) {
      const absl::Status undone =
          take_back
              ? take_back(ctx)
              : absl::FailedPreconditionError("there is no change to undo");
      OP_REQUIRES(
          ctx, undone.ok(),
          absl::Status(
              undone.code(),
              absl::StrCat(why, "\nThe change could not be undone: ",
                           undone.message(), ". Restore a checkpoint")));
    }
    OP_REQUIRES(ctx, !raises_, absl::UnknownError(why));
  }

 private:
  bool raises_;
  bool in_processes_;
  bool may_be_missing_;
};

LM_REGISTER_KERNEL("TakeBackKeys", TakeBackKeysOp);

}  // namespace

void KeepChanges(EngineResource* engine, std::vector<KeptChange> changes,
                 std::function<Status()> forget_step) {
  const auto kept =
      std::make_shared<const std::vector<KeptChange>>(std::move(changes));
  // The engine owns this function. If the function also owned the engine,
  // neither would ever be deleted.
  engine->KeepTakeBack([engine, kept, forget_step = std::move(forget_step)](
                           OpKernelContext* ctx) {
    return TakeBack(ctx, engine, *kept, forget_step);
  });
}

}  // namespace layoutmap
