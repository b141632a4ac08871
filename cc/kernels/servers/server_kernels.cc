// Kernels that a server runs. In each step, one op reads the rows of all
// tables, and one op updates the rows of all tables.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/views.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/served_keys/fetched_steps.h"
#include "cc/core/servers/applied_closures.h"
#include "cc/core/servers/messages.h"
#include "cc/core/servers/pieces.h"
#include "cc/core/servers/wire.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "cc/kernels/servers/aligned_bytes.h"
#include "cc/kernels/servers/pieces_op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace layoutmap {
namespace {

using tensorflow::DataType;
using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class FetchRowsOp : public PiecesOp {
 public:
  using PiecesOp::PiecesOp;

  void Run(OpKernelContext* ctx) override {
    AlignedBytes request;
    OP_REQUIRES_OK(ctx, request.Get(ctx, "request"));
    LockedShards shards;
    OP_REQUIRES_OK(ctx, shards.Lock(ctx, {"shards", "applied"},
                                    LockedShards::Mode::kShared));
    const int num_shards = static_cast<int>(pieces().size());
    std::vector<RowPartition> partitions;
    std::vector<PieceSize> sizes;
    OP_REQUIRES_OK(ctx, ReadSizes(shards, &partitions, &sizes));
    FetchMessage message;
    OP_REQUIRES_OK(ctx, ToTf(message.Read(request.bytes(), sizes)));
    ShardedView<const int64_t> applied;
    OP_REQUIRES_OK(ctx, shards.View(num_shards, kApplied, applied_partition(),
                                    {}, &applied, tensorflow::DT_INT64));
    std::vector<PieceRead> reads(num_shards);
    for (int p = 0; p < num_shards; ++p) {
      const Piece& piece = pieces()[p];
      reads[p].row_type = piece.row_type;
      reads[p].rows = message.rows[p];
      if (piece.row_type == RowType::kFloat32) {
        OP_REQUIRES_OK(ctx, shards.View(p, piece.table, partitions[p],
                                        {piece.dim}, &reads[p].table));
      } else {
        OP_REQUIRES_OK(ctx,
                       shards.View(p, piece.table, partitions[p], {piece.dim},
                                   &reads[p].half_table, DtypeOf(piece)));
      }
    }
    Tensor* fetched = nullptr;
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(
                 "fetched",
                 TensorShape({kFetchedHeader +
                              NumValues(reads) * WireBytes(message.wire)}),
                 &fetched));
    uint8_t* const out = fetched->flat<uint8_t>().data();
    WriteNumUpdates(AppliedClosures::NumUpdates(
                        {applied.shards[0], applied_partition().num_rows()}),
                    out);
    const RowKernels& kernels = RowKernelsFor(CurrentCpuLevel());
    uint8_t* const values = out + kFetchedHeader;
    if (message.wire == RowType::kFloat32) {
      FetchRows(reads, kernels, TfParallelFor(ctx),
                reinterpret_cast<float*>(values));
    } else {
      FetchRows(reads, kernels, TfParallelFor(ctx),
                reinterpret_cast<uint16_t*>(values));
    }
  }
};

class ApplyRowsOp : public PiecesOp {
 public:
  explicit ApplyRowsOp(OpKernelConstruction* ctx) : PiecesOp(ctx) {
    if (ctx->status().ok()) OP_REQUIRES_OK(ctx, ReadRules(ctx));
  }

  void Run(OpKernelContext* ctx) override {
    bool is_new;
    OP_REQUIRES_OK(ctx, ApplyOnce(ctx, &is_new));
    OP_REQUIRES_OK(ctx, SetScalar(ctx, "is_new", is_new));
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
    rounding_seed_ = static_cast<uint64_t>(seed);
    int32_t num_fetched;
    TF_RETURN_IF_ERROR(ctx->GetAttr("num_fetched", &num_fetched));
    has_fetched_ = num_fetched > 0;
    TF_RETURN_IF_ERROR(OneShard(FetchedSteps::kSize, &fetched_partition_));
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
    return absl::OkStatus();
  }

  // Applies the update in the request, unless it was already applied. All
  // checks run before the first change, so that a request that fails changes
  // nothing.
  absl::Status ApplyOnce(OpKernelContext* ctx, bool* is_new) const {
    AlignedBytes request;
    TF_RETURN_IF_ERROR(request.Get(ctx, "request"));
    LockedShards shards;
    TF_RETURN_IF_ERROR(shards.Lock(
        ctx, {"shards", "slots", "rounding_steps", "fetched_steps", "applied"},
        LockedShards::Mode::kExclusive));
    TF_RETURN_IF_ERROR(CheckVariables(ctx, shards));

    std::vector<RowPartition> partitions;
    std::vector<PieceSize> sizes;
    TF_RETURN_IF_ERROR(ReadSizes(shards, &partitions, &sizes));
    ApplyMessage message;
    TF_RETURN_IF_ERROR(ToTf(message.Read(request.bytes(), sizes)));
    const ApplyHeader& header = message.header;
    ShardedView<int64_t> applied;
    TF_RETURN_IF_ERROR(shards.MutableView(ctx, shards.size() - 1, kApplied,
                                          applied_partition(), {}, &applied,
                                          tensorflow::DT_INT64));
    AppliedClosures closures(
        {applied.shards[0], applied_partition().num_rows()});
    bool is_repeated;
    TF_RETURN_IF_ERROR(ToTf(closures.Check(header.token, &is_repeated)));

    // If tables have open vocabularies, the message contains the ticket of the
    // step instead of the number of updates.
    int64_t num_updates = header.num_updates;
    ShardedView<int64_t> fetched;
    if (!is_repeated && has_fetched_) {
      TF_RETURN_IF_ERROR(shards.MutableView(ctx, shards.size() - 2,
                                            kFetchedSteps, fetched_partition_,
                                            {}, &fetched));
      TF_RETURN_IF_ERROR(
          ToTf(FetchedSteps({fetched.shards[0], fetched_partition_.num_rows()})
                   .Find(header.num_updates, &num_updates)));
    }

    Span<const float> values = message.gradients;
    std::unique_ptr<float[]> widened;
    if (message.wire == RowType::kBfloat16) {
      const int64_t count = message.half_gradients.size();
      // The memory is not initialized, because the next call writes all values.
      widened.reset(new float[count]);
      FromBfloat16(message.half_gradients, TfParallelFor(ctx), widened.get());
      values = {widened.get(), count};
    }
    std::vector<PieceUpdate> updates;
    TF_RETURN_IF_ERROR(ToTf(ReadUpdates(pieces(), message, values, &updates)));
    *is_new = !is_repeated;
    if (is_repeated) {
      closures.Repeat();
      return absl::OkStatus();
    }
    std::vector<int64_t*> counts;
    TF_RETURN_IF_ERROR(MakeViews(ctx, partitions, &shards, &updates, &counts));
    ApplyUpdates(pieces(), updates, rounding_seed_,
                 RowKernelsFor(CurrentCpuLevel()), TfParallelFor(ctx));
    for (int64_t* count : counts) ++*count;
    closures.Apply(header.token, num_updates);
    if (has_fetched_) {
      FetchedSteps({fetched.shards[0], fetched_partition_.num_rows()})
          .Forget(header.num_updates);
    }
    return absl::OkStatus();
  }

  absl::Status CheckVariables(OpKernelContext* ctx,
                              const LockedShards& shards) const {
    OpInputList slots, counts;
    TF_RETURN_IF_ERROR(ctx->input_list("slots", &slots));
    TF_RETURN_IF_ERROR(ctx->input_list("rounding_steps", &counts));
    int num_slots = 0, num_counts = 0;
    for (const Piece& piece : pieces()) {
      num_slots += NumSlots(piece.optimizer);
      num_counts += HasCount(piece);
    }
    constexpr char kNeeds[] = "The shards on this server need";
    TF_RETURN_IF_ERROR(
        CheckNumVariables(kNeeds, "slots", num_slots, slots.size()));
    return CheckNumVariables(kNeeds, "rounding_steps", num_counts,
                             counts.size());
  }

  static bool HasCount(const Piece& piece) {
    return piece.row_type != RowType::kFloat32 &&
           piece.optimizer != Optimizer::kNone;
  }

  absl::Status MakeViews(OpKernelContext* ctx,
                         const std::vector<RowPartition>& partitions,
                         LockedShards* shards,
                         std::vector<PieceUpdate>* updates,
                         std::vector<int64_t*>* counts) const {
    int next = static_cast<int>(pieces().size());
    for (size_t p = 0; p < updates->size(); ++p) {
      const Piece& piece = pieces()[p];
      PieceUpdate& update = (*updates)[p];
      const int i = static_cast<int>(p);
      if (piece.row_type == RowType::kFloat32) {
        TF_RETURN_IF_ERROR(shards->MutableView(
            ctx, i, piece.table, partitions[p], {piece.dim}, &update.table));
      } else {
        TF_RETURN_IF_ERROR(
            shards->MutableView(ctx, i, piece.table, partitions[p], {piece.dim},
                                &update.half_table, DtypeOf(piece)));
      }
      update.slots.resize(NumSlots(piece.optimizer));
      for (size_t j = 0; j < update.slots.size(); ++j) {
        const int64_t dim =
            SlotDim(piece.optimizer, static_cast<int>(j), piece.dim);
        TF_RETURN_IF_ERROR(
            shards->MutableView(ctx, next++, piece.table + " (slot variable)",
                                partitions[p], {dim}, &update.slots[j]));
      }
    }
    for (size_t p = 0; p < updates->size(); ++p) {
      if (!HasCount(pieces()[p])) continue;
      int64_t* count;
      TF_RETURN_IF_ERROR(
          shards->MutableCount(ctx, next++, pieces()[p].table, &count));
      (*updates)[p].num_updates = static_cast<uint64_t>(*count);
      counts->push_back(count);
    }
    return absl::OkStatus();
  }

  uint64_t rounding_seed_ = 0;
  bool has_fetched_ = false;
  RowPartition fetched_partition_;
};

LM_REGISTER_KERNEL("FetchRows", FetchRowsOp);
LM_REGISTER_KERNEL("ApplyRows", ApplyRowsOp);

}  // namespace
}  // namespace layoutmap
