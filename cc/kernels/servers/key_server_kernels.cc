// The kernel that a server runs for steps on tables with open vocabularies. It
// finds the rows of keys, assigns rows to new keys, and reads the rows of all
// tables.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <list>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/served_keys/evicted_rows.h"
#include "cc/core/served_keys/fetched_steps.h"
#include "cc/core/served_keys/key_messages.h"
#include "cc/core/served_keys/key_pieces.h"
#include "cc/core/servers/applied_closures.h"
#include "cc/core/servers/messages.h"
#include "cc/core/servers/pieces.h"
#include "cc/core/servers/wire.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/core/vocabulary/admit_keys.h"
#include "cc/core/vocabulary/first_rows.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "cc/kernels/servers/locked_key_piece.h"
#include "cc/kernels/servers/open_piece_views.h"
#include "cc/kernels/servers/pieces_op.h"
#include "cc/kernels/servers/server_records.h"
#include "cc/kernels/servers/server_resource.h"
#include "cc/kernels/vocabulary/locked_vocabulary.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace layoutmap {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class FetchKeysOp : public ServerOp<ServerStateOp> {
 public:
  using ServerOp::ServerOp;

 private:
  // The data of one fetch, which holds the locks of all variables.
  struct Step {
    explicit Step(const ServerResource& server) : server(server) {}

    const std::vector<Piece>& pieces() const { return server.pieces(); }
    // The settings of the shards of open tables.
    const std::vector<OpenPiece>& open() const {
      return server.settings().open;
    }
    bool is_open(size_t p) const { return server.settings().is_open[p]; }

    const ServerResource& server;
    LockedShards locked;
    KeyFetchMessage message;
    // The shards of tables with open vocabularies.
    std::vector<KeyPiece> key_pieces;
    std::deque<LockedKeyPiece> views;
    std::vector<KeyPieceStep> steps;
  };

  absl::Status RunOn(OpKernelContext* ctx, const ServerResource& server,
                     Span<const uint8_t> request) override {
    if (!server.has_fetched_steps()) {
      return absl::InvalidArgumentError(
          "`server` must have been created with `fetched_steps`. Received: a "
          "server of an embedding without open vocabularies; use "
          "`FetchServerRows`");
    }
    Step step(server);
    const bool training = KeyFetchMessage::IsTraining(request);
    step.locked.Lock(server.variables().fetch_keys,
                     training ? LockedShards::Mode::kExclusive
                              : LockedShards::Mode::kShared);
    TF_RETURN_IF_ERROR(server.CheckNotRetired());
    TF_RETURN_IF_ERROR(Read(request, &step));
    Tensor bytes;
    TF_RETURN_IF_ERROR(Allocate(ctx, step, &bytes));
    int64_t ticket = 0;
    if (training) {
      TF_RETURN_IF_ERROR(Train(ctx, &step, &ticket));
    } else {
      for (size_t i = 0; i < step.open().size(); ++i) {
        TF_RETURN_IF_ERROR(step.views[i].View(step.locked, step.key_pieces[i],
                                              &step.steps[i]));
      }
      FindInPieces(step.key_pieces, TfParallelFor(ctx), &step.steps);
    }
    return Write(ctx, step, ticket, &bytes);
  }

  // Reads the message and checks that it matches the variables.
  static absl::Status Read(Span<const uint8_t> bytes, Step* step) {
    const std::vector<PieceSize>& sizes = step->server.sizes();
    TF_RETURN_IF_ERROR(ToTf(
        step->message.Read(bytes, sizes, step->server.settings().is_open)));
    const std::vector<OpenPiece>& open = step->open();
    step->steps.resize(open.size());
    for (size_t i = 0; i < open.size(); ++i) {
      KeyPiece& piece = step->key_pieces.emplace_back(open[i].piece);
      TF_RETURN_IF_ERROR(step->views.emplace_back().Find(
          step->locked, open[i].first_state, &piece));
      // The last shard of a table has one additional row, which cannot belong
      // to a key.
      const bool is_last =
          piece.first_bucket + piece.num_buckets == piece.layout.num_buckets();
      const int64_t num_rows = piece.num_buckets * kKeysPerBucket + is_last;
      if (sizes[open[i].place].num_rows != num_rows ||
          (piece.has_unknown_row && !is_last)) {
        return absl::InvalidArgumentError(absl::StrCat(
            "A shard of an open table must have 8 rows for each bucket, and "
            "the last shard one more. Received: ",
            sizes[open[i].place].num_rows, " rows and ", piece.num_buckets,
            " buckets (table '", piece.table, "')"));
      }
      const PieceKeys& keys = step->message.keys[open[i].place];
      TF_RETURN_IF_ERROR(ToTf(CheckKeysOf(piece, keys.keys)));
      step->steps[i].keys = &keys;
    }
    return absl::OkStatus();
  }

  // Allocates memory for the largest possible response. This function is called
  // before the first change, so that the vocabularies stay unchanged if the
  // allocation fails.
  static absl::Status Allocate(OpKernelContext* ctx, const Step& step,
                               Tensor* bytes) {
    int64_t num_keys = 0, num_values = 0;
    for (size_t p = 0; p < step.pieces().size(); ++p) {
      const int64_t size = step.message.keys[p].keys.size();
      num_keys += size;
      num_values += step.pieces()[p].dim *
                    (step.is_open(p) ? size + 1 : step.message.rows[p].size());
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
                                 fetched_partition(), {}, &fetched));
    AppliedClosures closures(
        {applied.shards[0], applied_partition().num_rows()});
    FetchedSteps awaited({fetched.shards[0], fetched_partition().num_rows()});
    bool is_applied = false, is_repeated = false;
    TF_RETURN_IF_ERROR(ToTf(closures.Check(token, &is_applied)));
    // The record of an applied closure no longer exists.
    if (!is_applied) {
      TF_RETURN_IF_ERROR(ToTf(awaited.Check(token, &is_repeated)));
    }
    TF_RETURN_IF_ERROR(MakeViews(ctx, step));
    awaited.Begin(token);
    if (is_applied) {
      FindInPieces(step->key_pieces, TfParallelFor(ctx), &step->steps);
      return absl::OkStatus();
    }
    if (is_repeated) {
      FindInPieces(step->key_pieces, TfParallelFor(ctx), &step->steps);
      PinInPieces(step->key_pieces, awaited.AgeOf(token), &step->steps);
      NoteChanged(*step);
      *ticket = awaited.Renew(token, closures.num_updates());
      return absl::OkStatus();
    }
    for (KeyPieceStep& one : step->steps) one.oldest_age = awaited.OldestAge();
    std::vector<std::list<EvictedBlock>> evicted(step->open().size());
    CopyEvictedRows(step, &evicted);
    TF_RETURN_IF_ERROR(ToTf(
        AdmitToPieces(step->key_pieces, TfParallelFor(ctx), &step->steps)));
    for (size_t i = 0; i < step->open().size(); ++i) {
      // Shards that share a vocabulary have the same numbers. All counts of a
      // shard that does not own its vocabulary are 0.
      const Span<int64_t> numbers = step->views[i].numbers();
      numbers[kVocabularyStep] = step->steps[i].last_step + 1;
      const uint32_t kind = step->message.kinds[step->open()[i].place];
      if (kind != kNoKeysYet) numbers[kKeyKind] = kind;
      AddCounts(step->steps[i].counts, numbers);
      step->server.records()
          .evicted(step->open()[i].place)
          .Add(std::move(evicted[i]));
    }
    NoteChanged(*step);
    *ticket = awaited.Add(token, closures.num_updates());
    return absl::OkStatus();
  }

  static absl::Status MakeViews(OpKernelContext* ctx, Step* step) {
    // The kind of the keys of each vocabulary, at the index of its owner.
    std::vector<uint32_t> kinds(step->open().size(), kNoKeysYet);
    for (size_t i = 0; i < step->open().size(); ++i) {
      const OpenPiece& open = step->open()[i];
      LockedKeyPiece& view = step->views[i];
      TF_RETURN_IF_ERROR(ViewOpenPiece(ctx, step->server, i,
                                       step->key_pieces[i], &step->locked,
                                       &view, &step->steps[i]));
      const uint32_t kind = step->message.kinds[open.place];
      if (kind > kStringKeys) {
        return absl::InvalidArgumentError(absl::StrCat(
            "`request` must have a kind of keys in [0, 2]. Received: ", kind));
      }
      TF_RETURN_IF_ERROR(CheckKeyKind(step->pieces()[open.place].table,
                                      view.numbers(),
                                      static_cast<KeyKind>(kind)));
      uint32_t& shared = kinds[OwnerOf(*step, i)];
      if (shared != kNoKeysYet && kind != kNoKeysYet && kind != shared) {
        return absl::InvalidArgumentError(absl::StrCat(
            "`request` must have keys of one kind for all tables that share a "
            "vocabulary. Received: kinds ",
            shared, " and ", kind, " (table '",
            step->pieces()[open.place].table, "')"));
      }
      if (kind != kNoKeysYet) shared = kind;
    }
    return absl::OkStatus();
  }

  // Returns the index of the open shard that owns the vocabulary of an open
  // shard.
  static size_t OwnerOf(const Step& step, size_t i) {
    const KeyPiece& piece = step.open()[i].piece;
    return piece.is_owner() ? i : static_cast<size_t>(piece.owner);
  }

  // Copies the rows of the keys that the step evicts, before the step writes
  // the rows of new keys. The copies are added to the records of the server
  // after the step has succeeded.
  static void CopyEvictedRows(Step* step,
                              std::vector<std::list<EvictedBlock>>* evicted) {
    for (size_t i = 0; i < step->open().size(); ++i) {
      if (!step->server.records().keeps_evicted(step->open()[i].place)) {
        continue;
      }
      const FirstRows& rows = step->steps[i].first_rows;
      std::list<EvictedBlock>* const blocks = &(*evicted)[i];
      step->steps[i].before_first_rows = [&rows,
                                          blocks](Span<const NewKey> new_keys) {
        std::vector<int64_t> keys, at;
        for (const NewKey& one : new_keys) {
          if (one.evicted == kEmptyKey) continue;
          keys.push_back(one.evicted);
          at.push_back(one.row);
        }
        if (keys.empty()) return Status();
        blocks->push_back(
            CopyEvicted(std::move(keys), Span<const int64_t>(at), rows));
        return Status();
      };
    }
  }

  // Records the rows of the step's keys as changed in the shard that owns the
  // vocabulary, because the last steps and counts of the keys have changed. In
  // other shards, only the rows of new keys have changed.
  static void NoteChanged(const Step& step) {
    ServerRecords& records = step.server.records();
    for (size_t i = 0; i < step.open().size(); ++i) {
      const size_t owner = OwnerOf(step, i);
      records.NoteChanged(step.open()[owner].place, step.steps[i].rows);
      if (owner == i) continue;
      records.NoteChanged(step.open()[i].place, step.steps[i].new_rows);
    }
  }

  // Writes the response, which contains the row of each key, followed by the
  // values of the requested rows.
  static absl::Status Write(OpKernelContext* ctx, const Step& step,
                            int64_t ticket, Tensor* bytes) {
    auto* const out = bytes->flat<uint8_t>().data();
    WriteNumUpdates(ticket, out);
    std::vector<PieceRead> reads(step.pieces().size());
    std::vector<std::vector<uint32_t>> rows(step.pieces().size());
    auto* next = out + kFetchedHeader;
    int64_t num_keys = 0;
    for (size_t i = 0; i < step.open().size(); ++i) {
      const KeyPieceStep& one = step.steps[i];
      const size_t size = one.rows.size() * sizeof(uint32_t);
      if (size > 0) std::memcpy(next, one.rows.data(), size);
      next += size;
      num_keys += static_cast<int64_t>(one.rows.size());
      rows[step.open()[i].place] = RowsToSend(step.key_pieces[i], one);
    }
    uint8_t* const values = out + FetchedKeysHeader(num_keys);
    std::fill(next, values, 0);
    for (size_t p = 0; p < step.pieces().size(); ++p) {
      const Piece& piece = step.pieces()[p];
      reads[p].row_type = piece.row_type;
      reads[p].rows = step.message.rows[p];
      if (step.is_open(p)) reads[p].rows = rows[p];
      const int i = static_cast<int>(p);
      if (piece.row_type == RowType::kFloat32) {
        TF_RETURN_IF_ERROR(step.locked.View(i, piece.table,
                                            step.server.partitions()[p],
                                            {piece.dim}, &reads[p].table));
      } else {
        TF_RETURN_IF_ERROR(step.locked.View(
            i, piece.table, step.server.partitions()[p], {piece.dim},
            &reads[p].half_table, DtypeOf(piece)));
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
};

LM_REGISTER_KERNEL("FetchKeys", FetchKeysOp);

}  // namespace
}  // namespace layoutmap
