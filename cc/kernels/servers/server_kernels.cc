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
#include "cc/kernels/servers/server_resource.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace layoutmap {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Reads the requested rows of locked shards. The last variable is `applied`.
absl::Status Fetch(OpKernelContext* ctx, const std::vector<Piece>& pieces,
                   const std::vector<RowPartition>& partitions,
                   const RowPartition& applied_partition,
                   const LockedShards& shards, const FetchMessage& message) {
  ShardedView<const int64_t> applied;
  TF_RETURN_IF_ERROR(shards.View(shards.size() - 1, kApplied, applied_partition,
                                 {}, &applied, tensorflow::DT_INT64));
  std::vector<PieceRead> reads(pieces.size());
  for (size_t p = 0; p < pieces.size(); ++p) {
    const Piece& piece = pieces[p];
    const int i = static_cast<int>(p);
    reads[p].row_type = piece.row_type;
    reads[p].rows = message.rows[p];
    if (piece.row_type == RowType::kFloat32) {
      TF_RETURN_IF_ERROR(shards.View(i, piece.table, partitions[p], {piece.dim},
                                     &reads[p].table));
    } else {
      TF_RETURN_IF_ERROR(shards.View(i, piece.table, partitions[p], {piece.dim},
                                     &reads[p].half_table, DtypeOf(piece)));
    }
  }
  Tensor* fetched = nullptr;
  TF_RETURN_IF_ERROR(ctx->allocate_output(
      "fetched",
      TensorShape(
          {kFetchedHeader + NumValues(reads) * WireBytes(message.wire)}),
      &fetched));
  uint8_t* const out = fetched->flat<uint8_t>().data();
  WriteNumUpdates(AppliedClosures::NumUpdates(
                      {applied.shards[0], applied_partition.num_rows()}),
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
  return absl::OkStatus();
}

class FetchRowsOp : public PiecesOp {
 public:
  using PiecesOp::PiecesOp;

  void Run(OpKernelContext* ctx) override {
    AlignedBytes request;
    OP_REQUIRES_OK(ctx, request.Get(ctx, "request"));
    LockedShards shards;
    OP_REQUIRES_OK(ctx, shards.Lock(ctx, {"shards", "applied"},
                                    LockedShards::Mode::kShared));
    std::vector<RowPartition> partitions;
    std::vector<PieceSize> sizes;
    OP_REQUIRES_OK(ctx, ReadSizes(shards, &partitions, &sizes));
    FetchMessage message;
    OP_REQUIRES_OK(ctx, ToTf(message.Read(request.bytes(), sizes)));
    OP_REQUIRES_OK(ctx, Fetch(ctx, pieces(), partitions, applied_partition(),
                              shards, message));
  }
};

// Base class of the ops that read or update the rows of a server.
class RowsOp : public ServerStateOp {
 public:
  using ServerStateOp::ServerStateOp;

 protected:
  absl::Status FetchFrom(OpKernelContext* ctx, const ServerResource& server,
                         const FetchMessage& message) const {
    LockedShards shards;
    shards.Lock(server.variables().fetch_rows, LockedShards::Mode::kShared);
    return Fetch(ctx, server.pieces(), server.partitions(), applied_partition(),
                 shards, message);
  }

  // Allocates the output `is_new`.
  static absl::Status AllocateFlags(OpKernelContext* ctx,
                                    const TensorShape& shape, bool** is_new) {
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output("is_new", shape, &output));
    *is_new = output->flat<bool>().data();
    return absl::OkStatus();
  }

  // Applies the update in a message, unless it was already applied. All checks
  // run before the first change, so that an update that fails changes nothing.
  // Sets `is_new` to false if the update was already applied.
  absl::Status ApplyTo(OpKernelContext* ctx, const ServerResource& server,
                       const ApplyMessage& message, bool* is_new) const {
    LockedShards shards;
    shards.Lock(server.variables().apply_rows, LockedShards::Mode::kExclusive);
    TF_RETURN_IF_ERROR(server.CheckNotRetired());
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
    if (!is_repeated && server.has_fetched_steps()) {
      TF_RETURN_IF_ERROR(shards.MutableView(ctx, shards.size() - 2,
                                            kFetchedSteps, fetched_partition(),
                                            {}, &fetched));
      TF_RETURN_IF_ERROR(
          ToTf(FetchedSteps({fetched.shards[0], fetched_partition().num_rows()})
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
    TF_RETURN_IF_ERROR(
        ToTf(ReadUpdates(server.pieces(), message, values, &updates)));
    *is_new = !is_repeated;
    if (is_repeated) {
      closures.Repeat();
      return absl::OkStatus();
    }
    std::vector<int64_t*> counts;
    TF_RETURN_IF_ERROR(MakeViews(ctx, server, &shards, &updates, &counts));
    ApplyUpdates(server.pieces(), updates, server.settings().rounding_seed,
                 RowKernelsFor(CurrentCpuLevel()), TfParallelFor(ctx));
    for (size_t p = 0; p < message.rows.size(); ++p) {
      server.records().NoteChanged(p, message.rows[p]);
    }
    for (int64_t* count : counts) ++*count;
    closures.Apply(header.token, num_updates);
    if (server.has_fetched_steps()) {
      FetchedSteps({fetched.shards[0], fetched_partition().num_rows()})
          .Forget(header.num_updates);
    }
    return absl::OkStatus();
  }

 private:
  static absl::Status MakeViews(OpKernelContext* ctx,
                                const ServerResource& server,
                                LockedShards* shards,
                                std::vector<PieceUpdate>* updates,
                                std::vector<int64_t*>* counts) {
    const std::vector<Piece>& pieces = server.pieces();
    int next = static_cast<int>(pieces.size());
    for (size_t p = 0; p < updates->size(); ++p) {
      const Piece& piece = pieces[p];
      const RowPartition& partition = server.partitions()[p];
      PieceUpdate& update = (*updates)[p];
      const int i = static_cast<int>(p);
      if (piece.row_type == RowType::kFloat32) {
        TF_RETURN_IF_ERROR(shards->MutableView(ctx, i, piece.table, partition,
                                               {piece.dim}, &update.table));
      } else {
        TF_RETURN_IF_ERROR(shards->MutableView(ctx, i, piece.table, partition,
                                               {piece.dim}, &update.half_table,
                                               DtypeOf(piece)));
      }
      update.slots.resize(NumSlots(piece.optimizer));
      for (size_t j = 0; j < update.slots.size(); ++j) {
        const int64_t dim =
            SlotDim(piece.optimizer, static_cast<int>(j), piece.dim);
        TF_RETURN_IF_ERROR(
            shards->MutableView(ctx, next++, piece.table + " (slot variable)",
                                partition, {dim}, &update.slots[j]));
      }
    }
    for (size_t p = 0; p < updates->size(); ++p) {
      if (!ServerSettings::HasCount(pieces[p])) continue;
      int64_t* count;
      TF_RETURN_IF_ERROR(
          shards->MutableCount(ctx, next++, pieces[p].table, &count));
      (*updates)[p].num_updates = static_cast<uint64_t>(*count);
      counts->push_back(count);
    }
    return absl::OkStatus();
  }
};

class FetchServerRowsOp : public ServerOp<RowsOp> {
 public:
  using ServerOp::ServerOp;

 private:
  absl::Status RunOn(OpKernelContext* ctx, const ServerResource& server,
                     Span<const uint8_t> request) override {
    FetchMessage message;
    TF_RETURN_IF_ERROR(ToTf(message.Read(request, server.sizes())));
    return FetchFrom(ctx, server, message);
  }
};

class ApplyRowsOp : public ServerOp<RowsOp> {
 public:
  using ServerOp::ServerOp;

 private:
  absl::Status RunOn(OpKernelContext* ctx, const ServerResource& server,
                     Span<const uint8_t> request) override {
    bool* is_new;
    ApplyMessage message;
    TF_RETURN_IF_ERROR(ToTf(message.Read(request, server.sizes())));
    TF_RETURN_IF_ERROR(AllocateFlags(ctx, TensorShape({}), &is_new));
    return ApplyTo(ctx, server, message, is_new);
  }
};

class ApplyRowsOfBundleOp : public RowsOp {
 public:
  using RowsOp::RowsOp;

 private:
  void Run(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, ApplyAll(ctx));
  }

  absl::Status ApplyAll(OpKernelContext* ctx) const {
    tensorflow::OpInputList handles;
    AlignedBytes bundle;
    std::vector<Span<const uint8_t>> requests;
    TF_RETURN_IF_ERROR(ctx->input_list("servers", &handles));
    TF_RETURN_IF_ERROR(bundle.Get(ctx, "bundle"));
    TF_RETURN_IF_ERROR(
        ToTf(ReadBundle(bundle.bytes(), handles.size(), &requests)));
    std::vector<ServerPtr> servers(requests.size());
    std::vector<ApplyMessage> messages(requests.size());
    // All requests are checked before the first update, so that a request that
    // is not valid changes nothing.
    for (size_t i = 0; i < requests.size(); ++i) {
      const Tensor& handle = handles[static_cast<int>(i)];
      TF_RETURN_IF_ERROR(CheckRank("servers", handle, 0));
      TF_RETURN_IF_ERROR(LookUpServer(ctx, handle, &servers[i]));
      TF_RETURN_IF_ERROR(servers[i]->CheckNotRetired());
      TF_RETURN_IF_ERROR(
          ToTf(messages[i].Read(requests[i], servers[i]->sizes())));
    }
    bool* is_new;
    TF_RETURN_IF_ERROR(
        AllocateFlags(ctx, TensorShape({handles.size()}), &is_new));
    for (size_t i = 0; i < requests.size(); ++i) {
      TF_RETURN_IF_ERROR(ApplyTo(ctx, *servers[i], messages[i], is_new + i));
    }
    return absl::OkStatus();
  }
};

class ApplyAndFetchRowsOp : public ServerOp<RowsOp> {
 public:
  using ServerOp::ServerOp;

 private:
  absl::Status RunOn(OpKernelContext* ctx, const ServerResource& server,
                     Span<const uint8_t> request) override {
    JoinedMessage joined;
    ApplyMessage apply;
    FetchMessage fetch;
    TF_RETURN_IF_ERROR(ToTf(joined.Read(request)));
    // The rows are checked before the update, so that a request that fails
    // changes nothing.
    TF_RETURN_IF_ERROR(ToTf(fetch.Read(joined.fetch, server.sizes())));
    TF_RETURN_IF_ERROR(ToTf(apply.Read(joined.apply, server.sizes())));
    bool* is_new;
    TF_RETURN_IF_ERROR(AllocateFlags(ctx, TensorShape({}), &is_new));
    TF_RETURN_IF_ERROR(ApplyTo(ctx, server, apply, is_new));
    return FetchFrom(ctx, server, fetch);
  }
};

LM_REGISTER_KERNEL("FetchRows", FetchRowsOp);
LM_REGISTER_KERNEL("FetchServerRows", FetchServerRowsOp);
LM_REGISTER_KERNEL("ApplyRows", ApplyRowsOp);
LM_REGISTER_KERNEL("ApplyRowsOfBundle", ApplyRowsOfBundleOp);
LM_REGISTER_KERNEL("ApplyAndFetchRows", ApplyAndFetchRowsOp);

}  // namespace
}  // namespace layoutmap
