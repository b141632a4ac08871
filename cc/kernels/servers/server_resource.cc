#include "cc/kernels/servers/server_resource.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/served_keys/fetched_steps.h"
#include "cc/core/servers/applied_closures.h"
#include "cc/core/servers/messages.h"
#include "cc/core/servers/pieces.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "cc/kernels/servers/locked_key_piece.h"
#include "cc/kernels/servers/pieces_op.h"
#include "cc/kernels/vocabulary/open_table_specs.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/tensor.h"

namespace layoutmap {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::ResourceHandle;

ServerStateOp::ServerStateOp(OpKernelConstruction* ctx) : Kernel(ctx) {
  OP_REQUIRES_OK(ctx, OneShard(AppliedClosures::kSize, &applied_partition_));
  OP_REQUIRES_OK(ctx, OneShard(FetchedSteps::kSize, &fetched_partition_));
}

absl::Status LookUpServer(OpKernelContext* ctx,
                          const tensorflow::Tensor& handle, ServerPtr* server) {
  return tensorflow::LookupResource(ctx, handle.scalar<ResourceHandle>()(),
                                    server);
}

absl::Status LookUpServer(OpKernelContext* ctx, ServerPtr* server) {
  const tensorflow::Tensor* handle;
  TF_RETURN_IF_ERROR(GetInput(ctx, "server", 0, &handle));
  return LookUpServer(ctx, *handle, server);
}

absl::Status GetServer(OpKernelContext* ctx, ServerPtr* server) {
  TF_RETURN_IF_ERROR(LookUpServer(ctx, server));
  return (*server)->CheckNotRetired();
}

absl::Status ServerResource::CheckNotRetired() const {
  if (!records_->is_retired()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "A vocabulary of this embedding was resized: functions that were traced "
      "before the resize must be traced again, Keras models must be compiled "
      "again, `save` of a tlm.ps.Run must be called before the Run is created "
      "again, and a tlm.deltas.DeltaWriter must be created again with a new "
      "base");
}

namespace {

class CreateServerOp : public PiecesOp {
 public:
  explicit CreateServerOp(OpKernelConstruction* ctx) : PiecesOp(ctx) {
    if (ctx->status().ok()) OP_REQUIRES_OK(ctx, ReadRules(ctx));
    if (ctx->status().ok()) OP_REQUIRES_OK(ctx, ReadOpenPieces(ctx));
    if (ctx->status().ok()) OP_REQUIRES_OK(ctx, ReadOwners(ctx));
  }

  void Run(OpKernelContext* ctx) override {
    ServerResource::Variables variables;
    OP_REQUIRES_OK(ctx, FindVariables(ctx, &variables));
    std::vector<RowPartition> partitions;
    std::vector<PieceSize> sizes;
    {
      LockedShards shards;
      shards.Lock(variables.fetch_rows, LockedShards::Mode::kShared);
      OP_REQUIRES_OK(ctx, ReadSizes(shards, &partitions, &sizes));
    }
    OP_REQUIRES_OK(ctx,
                   SetScalar(ctx, "server",
                             ResourceHandle::MakeRefCountingHandle(
                                 new ServerResource(settings_, std::move(sizes),
                                                    std::move(partitions),
                                                    std::move(variables)),
                                 ctx->device()->name())));
  }

 private:
  absl::Status ReadRules(OpKernelConstruction* ctx) {
    std::vector<int64_t> numbers, first_rows, num_hyperparameters;
    std::vector<std::string> optimizers;
    int64_t seed;
    TF_RETURN_IF_ERROR(GetList(ctx, "table_numbers", &numbers));
    TF_RETURN_IF_ERROR(GetList(ctx, "first_rows", &first_rows));
    TF_RETURN_IF_ERROR(GetList(ctx, "optimizers", &optimizers));
    TF_RETURN_IF_ERROR(
        GetList(ctx, "num_hyperparameters", &num_hyperparameters));
    TF_RETURN_IF_ERROR(ctx->GetAttr("rounding_seed", &seed));
    settings_.rounding_seed = static_cast<uint64_t>(seed);
    for (size_t p = 0; p < pieces().size(); ++p) {
      Piece& piece = (*mutable_pieces())[p];
      piece.table_number = numbers[p];
      piece.first_row = first_rows[p];
      piece.num_hyperparameters = num_hyperparameters[p];
      TF_RETURN_IF_ERROR(ToTf(ParseOptimizer(optimizers[p], &piece.optimizer)));
      if (num_hyperparameters[p] >= 0) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("`num_hyperparameters` must not be negative. Received: ",
                       num_hyperparameters[p], " (table '", piece.table, "')"));
    }
    settings_.pieces = pieces();
    return absl::OkStatus();
  }

  absl::Status ReadOpenPieces(OpKernelConstruction* ctx) {
    std::vector<int64_t> places, first_buckets, num_buckets;
    std::vector<float> slot_values;
    OpenTableRules rules;
    TF_RETURN_IF_ERROR(ctx->GetAttr("open_pieces", &places));
    TF_RETURN_IF_ERROR(ctx->GetAttr("first_buckets", &first_buckets));
    TF_RETURN_IF_ERROR(ctx->GetAttr("vocabulary_buckets", &num_buckets));
    TF_RETURN_IF_ERROR(ctx->GetAttr("slot_values", &slot_values));
    TF_RETURN_IF_ERROR(rules.Read(ctx));
    const size_t size = places.size();
    if (first_buckets.size() != size || num_buckets.size() != size ||
        !rules.AreOf(size)) {
      return absl::InvalidArgumentError(
          absl::StrCat("The lists about shards of open tables must have the "
                       "same size. Received: ",
                       size, " `open_pieces` and lists of other sizes"));
    }
    int32_t num_fetched;
    TF_RETURN_IF_ERROR(ctx->GetAttr("num_fetched", &num_fetched));
    settings_.has_fetched_steps = num_fetched > 0;
    settings_.is_open.resize(pieces().size());
    size_t next_value = 0;
    for (size_t i = 0; i < size; ++i) {
      const int64_t place = places[i];
      if (place < 0 || place >= static_cast<int64_t>(pieces().size()) ||
          settings_.is_open[place]) {
        return absl::InvalidArgumentError(absl::StrCat(
            "`open_pieces` must be distinct shards of this server. Received: ",
            place));
      }
      settings_.is_open[place] = true;
      OpenPiece& open = settings_.open.emplace_back();
      open.place = static_cast<int>(place);
      open.piece.table = pieces()[place].table;
      open.piece.first_bucket = first_buckets[i];
      open.piece.has_unknown_row = rules.has_unknown_row(i);
      TF_RETURN_IF_ERROR(
          ToTf(BucketLayout::Make(num_buckets[i], &open.piece.layout)));
      TF_RETURN_IF_ERROR(rules.Get(i, &open.piece.policy, &open.values));
      for (int j = 0; j < NumSlots(pieces()[place].optimizer); ++j) {
        if (next_value >= slot_values.size()) {
          return absl::InvalidArgumentError(
              absl::StrCat("`slot_values` must have one value for each slot "
                           "variable. Received: ",
                           slot_values.size()));
        }
        open.slot_values.push_back(slot_values[next_value++]);
      }
    }
    return absl::OkStatus();
  }

  // Reads which shards share a vocabulary.
  absl::Status ReadOwners(OpKernelConstruction* ctx) {
    std::vector<int64_t> owners;
    TF_RETURN_IF_ERROR(ctx->GetAttr("vocabulary_of", &owners));
    std::vector<OpenPiece>& open = settings_.open;
    if (owners.empty()) return SetFirstVariables();
    if (owners.size() != open.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "`vocabulary_of` must have one value for each of ", open.size(),
          " `open_pieces`. Received: ", owners.size()));
    }
    for (size_t i = 0; i < open.size(); ++i) {
      const int64_t owner = owners[i];
      if (owner < 0 || owner >= static_cast<int64_t>(open.size()) ||
          owners[owner] != owner) {
        return absl::InvalidArgumentError(absl::StrCat(
            "`vocabulary_of` must be indices into `open_pieces` of shards that "
            "own a vocabulary. Received: ",
            owner));
      }
      if (owner == static_cast<int64_t>(i)) continue;
      KeyPiece& piece = open[i].piece;
      const KeyPiece& other = open[owner].piece;
      if (piece.first_bucket != other.first_bucket ||
          piece.layout.num_buckets() != other.layout.num_buckets()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "Shards that share a vocabulary must have the same "
            "`first_buckets` and `vocabulary_buckets`. Received: ",
            other.first_bucket, " of ", other.layout.num_buckets(), " (table '",
            other.table, "') and ", piece.first_bucket, " of ",
            piece.layout.num_buckets(), " (table '", piece.table, "')"));
      }
      piece.owner = static_cast<int32_t>(owner);
      piece.policy = other.policy;
    }
    return SetFirstVariables();
  }

  // Sets the indices of the variables of open shards in `fetch_keys`.
  absl::Status SetFirstVariables() {
    auto next = static_cast<int>(pieces().size());
    for (OpenPiece& open : settings_.open) {
      open.first_slot = next;
      next += NumSlots(pieces()[open.place].optimizer);
    }
    for (OpenPiece& open : settings_.open) {
      open.first_state = next;
      if (open.piece.is_owner()) {
        next += LockedKeyPiece::NumVariables(open.piece);
      }
    }
    for (OpenPiece& open : settings_.open) {
      if (open.piece.is_owner()) continue;
      open.first_state = settings_.open[open.piece.owner].first_state;
    }
    return absl::OkStatus();
  }

  absl::Status FindVariables(OpKernelContext* ctx,
                             ServerResource::Variables* found) const {
    VariableList shards, slots, counts, state, fetched_steps, applied;
    TF_RETURN_IF_ERROR(shards.Add(ctx, "shards"));
    TF_RETURN_IF_ERROR(slots.Add(ctx, "slots"));
    TF_RETURN_IF_ERROR(counts.Add(ctx, "rounding_steps"));
    TF_RETURN_IF_ERROR(state.Add(ctx, "state"));
    TF_RETURN_IF_ERROR(fetched_steps.Add(ctx, "fetched_steps"));
    TF_RETURN_IF_ERROR(applied.Add(ctx, "applied"));
    // For each shard, the index of its first slot variable.
    std::vector<int> first_slots;
    int num_slots = 0, num_counts = 0, num_state = 0;
    for (const Piece& piece : pieces()) {
      first_slots.push_back(num_slots);
      num_slots += NumSlots(piece.optimizer);
      num_counts += ServerSettings::HasCount(piece);
    }
    first_slots.push_back(num_slots);
    for (const OpenPiece& open : settings_.open) {
      if (!open.piece.is_owner()) continue;
      num_state += LockedKeyPiece::NumVariables(open.piece);
    }
    constexpr char kNeeds[] = "The shards on this server need";
    TF_RETURN_IF_ERROR(
        CheckNumVariables(kNeeds, "slots", num_slots, slots.size()));
    TF_RETURN_IF_ERROR(
        CheckNumVariables(kNeeds, "rounding_steps", num_counts, counts.size()));
    TF_RETURN_IF_ERROR(
        CheckNumVariables(kNeeds, "state", num_state, state.size()));
    if (settings_.has_fetched_steps || !settings_.open.empty()) {
      TF_RETURN_IF_ERROR(
          CheckNumVariables(kNeeds, "fetched_steps", 1, fetched_steps.size()));
    }

    AddAll(shards, &found->fetch_rows);
    AddAll(applied, &found->fetch_rows);
    TF_RETURN_IF_ERROR(found->fetch_rows.SetLockOrder(/*is_written=*/false));
    for (const VariableList* list :
         {&shards, &slots, &counts, &fetched_steps, &applied}) {
      AddAll(*list, &found->apply_rows);
    }
    TF_RETURN_IF_ERROR(found->apply_rows.SetLockOrder(/*is_written=*/true));
    if (!settings_.has_fetched_steps) return absl::OkStatus();
    AddAll(shards, &found->fetch_keys);
    for (const OpenPiece& open : settings_.open) {
      found->fetch_keys.Add(slots, first_slots[open.place],
                            first_slots[open.place + 1]);
    }
    for (const VariableList* list : {&state, &fetched_steps, &applied}) {
      AddAll(*list, &found->fetch_keys);
    }
    return found->fetch_keys.SetLockOrder(/*is_written=*/true);
  }

  static void AddAll(const VariableList& from, VariableList* to) {
    to->Add(from, 0, from.size());
  }

  ServerSettings settings_;
};

LM_REGISTER_KERNEL("CreateServer", CreateServerOp);

}  // namespace
}  // namespace layoutmap
