// The kernel that a server runs for steps on tables with open vocabularies. It
// finds the rows of keys, assigns rows to new keys, and reads the rows of all
// tables.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/served_keys/fetched_steps.h"
#include "cc/core/served_keys/key_messages.h"
#include "cc/core/served_keys/key_pieces.h"
#include "cc/core/servers/applied_closures.h"
#include "cc/core/servers/messages.h"
#include "cc/core/servers/pieces.h"
#include "cc/core/servers/wire.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "cc/kernels/servers/aligned_bytes.h"
#include "cc/kernels/servers/locked_key_piece.h"
#include "cc/kernels/servers/pieces_op.h"
#include "cc/kernels/vocabulary/locked_vocabulary.h"
#include "cc/kernels/vocabulary/open_table_specs.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace layoutmap {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class FetchKeysOp : public PiecesOp {
 public:
  explicit FetchKeysOp(OpKernelConstruction* ctx) : PiecesOp(ctx) {
    if (ctx->status().ok()) OP_REQUIRES_OK(ctx, ReadOpenPieces(ctx));
    OP_REQUIRES_OK(ctx, OneShard(FetchedSteps::kSize, &fetched_partition_));
  }

  void Run(OpKernelContext* ctx) override {
    AlignedBytes request;
    OP_REQUIRES_OK(ctx, request.Get(ctx, "request"));
    Step step;
    const bool training = KeyFetchMessage::IsTraining(request.bytes());
    OP_REQUIRES_OK(
        ctx, step.locked.Lock(
                 ctx, {"shards", "slots", "state", "fetched_steps", "applied"},
                 training ? LockedShards::Mode::kExclusive
                          : LockedShards::Mode::kShared));
    OP_REQUIRES_OK(ctx, Read(ctx, request.bytes(), &step));
    Tensor bytes;
    OP_REQUIRES_OK(ctx, Allocate(ctx, step, &bytes));
    int64_t ticket = 0;
    if (training) {
      OP_REQUIRES_OK(ctx, Train(ctx, &step, &ticket));
    } else {
      for (size_t i = 0; i < open_.size(); ++i) {
        OP_REQUIRES_OK(ctx, step.views[i].View(step.locked, step.pieces[i],
                                               &step.steps[i]));
      }
      FindInPieces(step.pieces, TfParallelFor(ctx), &step.steps);
    }
    OP_REQUIRES_OK(ctx, Write(ctx, step, ticket, &bytes));
  }

 private:
  // The data of one fetch, which holds the locks of all variables.
  struct Step {
    LockedShards locked;
    KeyFetchMessage message;
    std::vector<RowPartition> partitions;
    std::vector<PieceSize> sizes;
    // The shards of tables with open vocabularies.
    std::vector<KeyPiece> pieces;
    std::deque<LockedKeyPiece> views;
    std::vector<KeyPieceStep> steps;
  };

  // The attributes of one shard of a table with an open vocabulary.
  struct OpenPiece {
    // Index of the shard among all shards of the server.
    int place = 0;
    KeyPiece piece;
    FirstValues values;
    Optimizer optimizer = Optimizer::kNone;
    std::vector<float> slot_values;
  };

  absl::Status ReadOpenPieces(OpKernelConstruction* ctx) {
    std::vector<int64_t> places, first_buckets, num_buckets;
    std::vector<std::string> optimizers;
    std::vector<float> slot_values;
    OpenTableRules rules;
    TF_RETURN_IF_ERROR(ctx->GetAttr("open_pieces", &places));
    TF_RETURN_IF_ERROR(ctx->GetAttr("first_buckets", &first_buckets));
    TF_RETURN_IF_ERROR(ctx->GetAttr("vocabulary_buckets", &num_buckets));
    TF_RETURN_IF_ERROR(ctx->GetAttr("optimizers", &optimizers));
    TF_RETURN_IF_ERROR(ctx->GetAttr("slot_values", &slot_values));
    TF_RETURN_IF_ERROR(rules.Read(ctx));
    const size_t size = places.size();
    if (first_buckets.size() != size || num_buckets.size() != size ||
        optimizers.size() != size || !rules.AreOf(size)) {
      return absl::InvalidArgumentError(
          absl::StrCat("The lists about shards of open tables must have the "
                       "same size. Received: ",
                       size, " `open_pieces` and lists of other sizes"));
    }
    is_open_.resize(pieces().size());
    size_t next_value = 0;
    for (size_t i = 0; i < size; ++i) {
      const int64_t place = places[i];
      if (place < 0 || place >= static_cast<int64_t>(pieces().size()) ||
          is_open_[place]) {
        return absl::InvalidArgumentError(absl::StrCat(
            "`open_pieces` must be distinct shards of this server. Received: ",
            place));
      }
      is_open_[place] = true;
      OpenPiece& open = open_.emplace_back();
      open.place = static_cast<int>(place);
      open.piece.table = pieces()[place].table;
      open.piece.first_bucket = first_buckets[i];
      open.piece.has_unknown_row = rules.has_unknown_row(i);
      TF_RETURN_IF_ERROR(
          ToTf(BucketLayout::Make(num_buckets[i], &open.piece.layout)));
      TF_RETURN_IF_ERROR(rules.Get(i, &open.piece.policy, &open.values));
      TF_RETURN_IF_ERROR(ToTf(ParseOptimizer(optimizers[i], &open.optimizer)));
      for (int j = 0; j < NumSlots(open.optimizer); ++j) {
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

  // Reads the message and checks that it matches the variables.
  absl::Status Read(OpKernelContext* ctx, Span<const uint8_t> bytes,
                    Step* step) const {
    TF_RETURN_IF_ERROR(
        ReadSizes(step->locked, &step->partitions, &step->sizes));
    OpInputList shards, slots, state;
    TF_RETURN_IF_ERROR(ctx->input_list("shards", &shards));
    TF_RETURN_IF_ERROR(ctx->input_list("slots", &slots));
    TF_RETURN_IF_ERROR(ctx->input_list("state", &state));
    int num_slots = 0, num_state = 0;
    for (const OpenPiece& open : open_) {
      num_slots += NumSlots(open.optimizer);
      num_state += LockedKeyPiece::NumVariables(open.piece);
    }
    constexpr char kNeeds[] = "The open tables on this server need";
    TF_RETURN_IF_ERROR(
        CheckNumVariables(kNeeds, "slots", num_slots, slots.size()));
    TF_RETURN_IF_ERROR(
        CheckNumVariables(kNeeds, "state", num_state, state.size()));
    TF_RETURN_IF_ERROR(ToTf(step->message.Read(bytes, step->sizes, is_open_)));
    step->steps.resize(open_.size());
    int next = shards.size() + slots.size();
    for (size_t i = 0; i < open_.size(); ++i) {
      KeyPiece& piece = step->pieces.emplace_back(open_[i].piece);
      TF_RETURN_IF_ERROR(
          step->views.emplace_back().Find(step->locked, next, &piece));
      next += LockedKeyPiece::NumVariables(piece);
      // The last shard of a table has one additional row, which cannot belong
      // to a key.
      const bool is_last =
          piece.first_bucket + piece.num_buckets == piece.layout.num_buckets();
      const int64_t num_rows = piece.num_buckets * kKeysPerBucket + is_last;
      if (step->sizes[open_[i].place].num_rows != num_rows ||
          (piece.has_unknown_row && !is_last)) {
        return absl::InvalidArgumentError(absl::StrCat(
            "A shard of an open table must have 8 rows for each bucket, and "
            "the last shard one more. Received: ",
            step->sizes[open_[i].place].num_rows, " rows and ",
            piece.num_buckets, " buckets (table '", piece.table, "')"));
      }
      const PieceKeys& keys = step->message.keys[open_[i].place];
      TF_RETURN_IF_ERROR(ToTf(CheckKeysOf(piece, keys.keys)));
      step->steps[i].keys = &keys;
    }
    return absl::OkStatus();
  }

  // Allocates memory for the largest possible response. This function is called
  // before the first change, so that the vocabularies stay unchanged if the
  // allocation fails.
  absl::Status Allocate(OpKernelContext* ctx, const Step& step,
                        Tensor* bytes) const {
    int64_t num_keys = 0, num_values = 0;
    for (size_t p = 0; p < pieces().size(); ++p) {
      const int64_t size = step.message.keys[p].keys.size();
      num_keys += size;
      num_values += pieces()[p].dim *
                    (is_open_[p] ? size + 1 : step.message.rows[p].size());
    }
    return ctx->allocate_temp(
        tensorflow::DT_UINT8,
        TensorShape({FetchedKeysHeader(num_keys) +
                     num_values * WireBytes(step.message.wire)}),
        bytes);
  }

  // Runs a training step. All checks run before any vocabulary is changed.
  absl::Status Train(OpKernelContext* ctx, Step* step, int64_t* ticket) const {
    const ClosureToken& token = step->message.token;
    ShardedView<int64_t> applied, fetched;
    TF_RETURN_IF_ERROR(step->locked.MutableView(ctx, step->locked.size() - 1,
                                                kApplied, applied_partition(),
                                                {}, &applied));
    TF_RETURN_IF_ERROR(
        step->locked.MutableView(ctx, step->locked.size() - 2, kFetchedSteps,
                                 fetched_partition_, {}, &fetched));
    AppliedClosures closures(
        {applied.shards[0], applied_partition().num_rows()});
    FetchedSteps awaited({fetched.shards[0], fetched_partition_.num_rows()});
    bool is_applied = false, is_repeated = false;
    TF_RETURN_IF_ERROR(ToTf(closures.Check(token, &is_applied)));
    TF_RETURN_IF_ERROR(ToTf(awaited.Check(token, &is_repeated)));
    TF_RETURN_IF_ERROR(MakeViews(ctx, step));
    awaited.Begin(token);
    if (is_applied) {
      FindInPieces(step->pieces, TfParallelFor(ctx), &step->steps);
      return absl::OkStatus();
    }
    if (is_repeated) {
      FindInPieces(step->pieces, TfParallelFor(ctx), &step->steps);
      PinInPieces(step->pieces, awaited.AgeOf(token), &step->steps);
      *ticket = awaited.Renew(token, closures.num_updates());
      return absl::OkStatus();
    }
    for (KeyPieceStep& one : step->steps) one.oldest_age = awaited.OldestAge();
    TF_RETURN_IF_ERROR(
        ToTf(AdmitToPieces(step->pieces, TfParallelFor(ctx), &step->steps)));
    for (size_t i = 0; i < open_.size(); ++i) {
      const Span<int64_t> numbers = step->views[i].numbers();
      numbers[kVocabularyStep] = step->steps[i].last_step + 1;
      const uint32_t kind = step->message.kinds[open_[i].place];
      if (kind != kNoKeysYet) numbers[kKeyKind] = kind;
      AddCounts(step->steps[i].counts, numbers);
    }
    *ticket = awaited.Add(token, closures.num_updates());
    return absl::OkStatus();
  }

  absl::Status MakeViews(OpKernelContext* ctx, Step* step) const {
    int next_slot = static_cast<int>(pieces().size());
    for (size_t i = 0; i < open_.size(); ++i) {
      const OpenPiece& open = open_[i];
      const Piece& piece = pieces()[open.place];
      LockedKeyPiece& view = step->views[i];
      FirstRows& rows = step->steps[i].first_rows;
      TF_RETURN_IF_ERROR(view.MutableView(ctx, &step->locked, step->pieces[i],
                                          &step->steps[i]));
      const uint32_t kind = step->message.kinds[open.place];
      if (kind > kStringKeys) {
        return absl::InvalidArgumentError(absl::StrCat(
            "`request` must have a kind of keys in [0, 2]. Received: ", kind));
      }
      TF_RETURN_IF_ERROR(CheckKeyKind(piece.table, view.numbers(),
                                      static_cast<KeyKind>(kind)));
      const RowPartition& partition = step->partitions[open.place];
      rows.values = open.values;
      rows.row_type = piece.row_type;
      rows.slot_values = open.slot_values;
      if (piece.row_type == RowType::kFloat32) {
        TF_RETURN_IF_ERROR(step->locked.MutableView(
            ctx, open.place, piece.table, partition, {piece.dim}, &rows.table));
        view.PlaceRows(&rows.table);
      } else {
        TF_RETURN_IF_ERROR(step->locked.MutableView(
            ctx, open.place, piece.table, partition, {piece.dim},
            &rows.half_table, DtypeOf(piece)));
        view.PlaceRows(&rows.half_table);
      }
      rows.slots.resize(NumSlots(open.optimizer));
      for (size_t j = 0; j < rows.slots.size(); ++j) {
        TF_RETURN_IF_ERROR(step->locked.MutableView(
            ctx, next_slot++, piece.table + " (slot variable)", partition,
            {SlotDim(open.optimizer, static_cast<int>(j), piece.dim)},
            &rows.slots[j]));
        view.PlaceRows(&rows.slots[j]);
      }
    }
    return absl::OkStatus();
  }

  // Writes the response, which contains the row of each key, followed by the
  // values of the requested rows.
  absl::Status Write(OpKernelContext* ctx, const Step& step, int64_t ticket,
                     Tensor* bytes) const {
    auto* const out = bytes->flat<uint8_t>().data();
    WriteNumUpdates(ticket, out);
    std::vector<PieceRead> reads(pieces().size());
    std::vector<std::vector<uint32_t>> rows(pieces().size());
    auto* next = out + kFetchedHeader;
    int64_t num_keys = 0;
    for (size_t i = 0; i < open_.size(); ++i) {
      const KeyPieceStep& one = step.steps[i];
      const size_t size = one.rows.size() * sizeof(uint32_t);
      if (size > 0) std::memcpy(next, one.rows.data(), size);
      next += size;
      num_keys += static_cast<int64_t>(one.rows.size());
      rows[open_[i].place] = RowsToSend(step.pieces[i], one);
    }
    uint8_t* const values = out + FetchedKeysHeader(num_keys);
    std::fill(next, values, 0);
    for (size_t p = 0; p < pieces().size(); ++p) {
      const Piece& piece = pieces()[p];
      reads[p].row_type = piece.row_type;
      reads[p].rows = step.message.rows[p];
      if (is_open_[p]) reads[p].rows = rows[p];
      const int i = static_cast<int>(p);
      if (piece.row_type == RowType::kFloat32) {
        TF_RETURN_IF_ERROR(step.locked.View(i, piece.table, step.partitions[p],
                                            {piece.dim}, &reads[p].table));
      } else {
        TF_RETURN_IF_ERROR(step.locked.View(i, piece.table, step.partitions[p],
                                            {piece.dim}, &reads[p].half_table,
                                            DtypeOf(piece)));
      }
    }
    const RowKernels& kernels = RowKernelsFor(CurrentCpuLevel());
    const RowType wire = step.message.wire;
    if (wire == RowType::kFloat32) {
      FetchRows(reads, kernels, TfParallelFor(ctx),
                reinterpret_cast<float*>(values));
    } else {
      FetchRows(reads, kernels, TfParallelFor(ctx),
                reinterpret_cast<uint16_t*>(values));
    }
    return ctx->set_output(
        "fetched",
        bytes->Slice(0, (values - out) + NumValues(reads) * WireBytes(wire)));
  }

  // Whether the table of each shard has an open vocabulary.
  std::vector<bool> is_open_;
  std::vector<OpenPiece> open_;
  RowPartition fetched_partition_;
};

LM_REGISTER_KERNEL("FetchKeys", FetchKeysOp);

}  // namespace
}  // namespace layoutmap
