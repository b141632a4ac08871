// Kernels that read the records of a server: the rows that have changed since
// the last delta, and the keys that were evicted.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/views.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/served_keys/evicted_rows.h"
#include "cc/core/servers/pieces.h"
#include "cc/core/steps/engine_config.h"
#include "cc/kernels/changes/row_values.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "cc/kernels/servers/pieces_op.h"
#include "cc/kernels/servers/server_resource.h"
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

absl::Status CheckPlace(const ServerResource& server, int64_t place) {
  if (place >= 0 && place < static_cast<int64_t>(server.pieces().size())) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("`piece` must be in [0, ",
                                                 server.pieces().size(),
                                                 "). Received: ", place));
}

// Base class of ops with the input `server`.
class RecordsOp : public Kernel {
 public:
  using Kernel::Kernel;

 private:
  void Run(OpKernelContext* ctx) final {
    ServerPtr server;
    OP_REQUIRES_OK(ctx, GetServer(ctx, &server));
    OP_REQUIRES_OK(ctx, RunOn(ctx, *server));
  }

  virtual absl::Status RunOn(OpKernelContext* ctx,
                             const ServerResource& server) = 0;
};

class WatchServerRowsOp : public RecordsOp {
 public:
  using RecordsOp::RecordsOp;

 private:
  absl::Status RunOn(OpKernelContext* ctx,
                     const ServerResource& server) override {
    return SetScalar(ctx, "watch", server.records().Watch());
  }
};

class RecordServerRowsOp : public RecordsOp {
 public:
  explicit RecordServerRowsOp(OpKernelConstruction* ctx) : RecordsOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("piece", &place_));
  }

 private:
  absl::Status RunOn(OpKernelContext* ctx,
                     const ServerResource& server) override {
    const Tensor* rows;
    TF_RETURN_IF_ERROR(CheckPlace(server, place_));
    TF_RETURN_IF_ERROR(GetInput(ctx, "rows", 1, &rows));
    const int64_t num_rows = server.sizes()[place_].num_rows;
    for (const int64_t row : View<int64_t>(*rows)) {
      if (row < num_rows) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("`rows` must be below ", num_rows, ". Received: ", row));
    }
    server.records().NoteChanged(place_, View<int64_t>(*rows));
    return absl::OkStatus();
  }

  int32_t place_ = 0;
};

class TakeServerRowsOp : public RecordsOp {
 public:
  using RecordsOp::RecordsOp;

 private:
  absl::Status RunOn(OpKernelContext* ctx,
                     const ServerResource& server) override {
    TF_RETURN_IF_ERROR(CheckSizes(ctx, server));
    return TakeChangedRows(ctx, {"shards", "slots", "lanes"},
                           &server.records().changed(),
                           [&](const LockedShards& locked,
                               const std::vector<std::vector<int64_t>>& rows) {
                             return Copy(ctx, server, locked, rows);
                           });
  }

  static absl::Status CheckSizes(OpKernelContext* ctx,
                                 const ServerResource& server) {
    int num_slots = 0;
    for (const Piece& piece : server.pieces()) {
      num_slots += static_cast<int>(NumSlots(piece.optimizer));
    }
    int num_vocabularies = 0;
    for (const OpenPiece& open : server.settings().open) {
      num_vocabularies += open.piece.is_owner();
    }
    const auto num_shards = static_cast<int>(server.pieces().size());
    TF_RETURN_IF_ERROR(CheckSize(ctx, "shards", num_shards));
    TF_RETURN_IF_ERROR(CheckSize(ctx, "slots", num_slots));
    return CheckSize(ctx, "lanes", kNumLaneVariables * num_vocabularies);
  }

  static absl::Status CheckSize(OpKernelContext* ctx, const char* input,
                                int expected) {
    OpInputList handles;
    TF_RETURN_IF_ERROR(ctx->input_list(input, &handles));
    return CheckNumVariables("The shards on this server need", input, expected,
                             handles.size());
  }

  static absl::Status Copy(OpKernelContext* ctx, const ServerResource& server,
                           const LockedShards& locked,
                           const std::vector<std::vector<int64_t>>& rows) {
    OutputsInOrder outputs;
    TF_RETURN_IF_ERROR(outputs.Start(ctx, "values"));
    const std::vector<Piece>& pieces = server.pieces();
    int slot = static_cast<int>(pieces.size()), lane = slot;
    for (const Piece& piece : pieces) {
      lane += static_cast<int>(NumSlots(piece.optimizer));
    }
    // Whether each shard owns a vocabulary.
    std::vector<bool> has_keys(pieces.size());
    for (const OpenPiece& open : server.settings().open) {
      has_keys[open.place] = open.piece.is_owner();
    }
    for (size_t p = 0; p < pieces.size(); ++p) {
      TableSpec spec;
      spec.name = pieces[p].table;
      spec.partition = server.partitions()[p];
      spec.dim = pieces[p].dim;
      spec.optimizer = pieces[p].optimizer;
      spec.row_type = pieces[p].row_type;
      TF_RETURN_IF_ERROR(outputs.SetVector(rows[p]));
      TF_RETURN_IF_ERROR(CopyRows(ctx, locked, static_cast<int>(p), slot, spec,
                                  rows[p], &outputs));
      slot += static_cast<int>(NumSlots(spec.optimizer));
      if (!has_keys[p]) continue;
      TF_RETURN_IF_ERROR(CopyLanes(ctx, locked, lane, spec, rows[p], &outputs));
      lane += kNumLaneVariables;
    }
    return outputs.Finish();
  }
};

class KeepEvictedRowsOp : public RecordsOp {
 public:
  explicit KeepEvictedRowsOp(OpKernelConstruction* ctx) : RecordsOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("piece", &place_));
  }

 private:
  absl::Status RunOn(OpKernelContext* ctx,
                     const ServerResource& server) override {
    TF_RETURN_IF_ERROR(CheckPlace(server, place_));
    server.records().KeepEvicted(place_);
    return absl::OkStatus();
  }

  int32_t place_ = 0;
};

class ReadEvictedRowsOp : public RecordsOp {
 public:
  explicit ReadEvictedRowsOp(OpKernelConstruction* ctx) : RecordsOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("piece", &place_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("max_bytes", &max_bytes_));
  }

 private:
  absl::Status RunOn(OpKernelContext* ctx,
                     const ServerResource& server) override {
    int64_t reported;
    TF_RETURN_IF_ERROR(CheckPlace(server, place_));
    TF_RETURN_IF_ERROR(GetScalar(ctx, "reported", &reported));
    EvictedBlock block;
    const int64_t next =
        server.records().evicted(place_).Read(reported, max_bytes_, &block);
    TF_RETURN_IF_ERROR(SetScalar(ctx, "next", next));
    TF_RETURN_IF_ERROR(SetVector<int64_t>(ctx, "keys", block.keys));
    const Piece& piece = server.pieces()[place_];
    block.values.resize(1 + NumSlots(piece.optimizer));
    OutputsInOrder outputs;
    TF_RETURN_IF_ERROR(outputs.Start(ctx, "values"));
    for (size_t v = 0; v < block.values.size(); ++v) {
      const int64_t dim =
          v == 0 ? piece.dim
                 : SlotDim(piece.optimizer, static_cast<int>(v) - 1, piece.dim);
      Tensor* output = nullptr;
      TF_RETURN_IF_ERROR(outputs.Allocate(
          v == 0 ? DtypeOf(piece) : tensorflow::DT_FLOAT,
          TensorShape({static_cast<int64_t>(block.keys.size()), dim}),
          &output));
      if (block.values[v].empty()) continue;
      std::memcpy(output->data(), block.values[v].data(),
                  block.values[v].size());
    }
    return outputs.Finish();
  }

  int32_t place_ = 0;
  int64_t max_bytes_ = 0;
};

class RetireServerOp : public Kernel {
 public:
  explicit RetireServerOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("retired", &retired_));
  }

  void Run(OpKernelContext* ctx) override {
    ServerPtr server;
    OP_REQUIRES_OK(ctx, LookUpServer(ctx, &server));
    // An op of a step checks the flag and holds these locks while it runs.
    LockedShards locked;
    locked.Lock(server->variables().apply_rows, LockedShards::Mode::kExclusive);
    server->records().SetRetired(retired_);
  }

 private:
  bool retired_ = true;
};

LM_REGISTER_KERNEL("WatchServerRows", WatchServerRowsOp);
LM_REGISTER_KERNEL("RecordServerRows", RecordServerRowsOp);
LM_REGISTER_KERNEL("TakeServerRows", TakeServerRowsOp);
LM_REGISTER_KERNEL("KeepEvictedRows", KeepEvictedRowsOp);
LM_REGISTER_KERNEL("ReadEvictedRows", ReadEvictedRowsOp);
LM_REGISTER_KERNEL("RetireServer", RetireServerOp);

}  // namespace
}  // namespace layoutmap
