// The resource that contains the shards of a server. The ops of a step get all
// variables of a server from this resource, so that a step passes one handle
// per server, for any number of tables.

#ifndef TF_LAYOUTMAP_KERNELS_SERVERS_SERVER_RESOURCE_H_
#define TF_LAYOUTMAP_KERNELS_SERVERS_SERVER_RESOURCE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/first_values.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/served_keys/key_pieces.h"
#include "cc/core/servers/messages.h"
#include "cc/core/servers/pieces.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "cc/kernels/servers/aligned_bytes.h"
#include "cc/kernels/servers/server_records.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"

namespace layoutmap {

// The settings of one shard of a table with an open vocabulary.
struct OpenPiece {
  // Index of the shard among all shards of the server.
  int place = 0;
  // Indices of the first slot variable and of the first state variable in the
  // variables `fetch_keys`. Shards that share a vocabulary have the same state.
  int first_slot = 0;
  int first_state = 0;
  KeyPiece piece;
  FirstValues values;
  std::vector<float> slot_values;
};

// The settings of all shards of a server.
struct ServerSettings {
  std::vector<Piece> pieces;
  uint64_t rounding_seed = 0;
  // Whether the table of each shard has an open vocabulary.
  std::vector<bool> is_open;
  // `piece.owner` is an index into this list.
  std::vector<OpenPiece> open;
  // Whether a table of the embedding has an open vocabulary, possibly on other
  // servers. In this case, the server records which steps have fetched rows.
  bool has_fetched_steps = false;

  static bool HasCount(const Piece& piece) {
    return piece.row_type != RowType::kFloat32 &&
           piece.optimizer != Optimizer::kNone;
  }
};

class ServerResource : public tensorflow::ResourceBase {
 public:
  // The variables that one kind of op locks, in this order:
  //
  //   * `fetch_rows`: the shards and `applied`.
  //   * `apply_rows`: the shards, all slot variables, the update counters of
  //     16-bit shards, `fetched_steps` if the server has it, and `applied`.
  //   * `fetch_keys`: the shards, the slot variables of open tables, the state
  //     of their vocabularies (once if several tables share a vocabulary),
  //     `fetched_steps` and `applied`.
  struct Variables {
    VariableList fetch_rows, apply_rows, fetch_keys;
  };

  // `sizes` and `partitions` have one element per shard.
  ServerResource(ServerSettings settings, std::vector<PieceSize> sizes,
                 std::vector<RowPartition> partitions, Variables variables)
      : settings_(std::move(settings)),
        sizes_(std::move(sizes)),
        partitions_(std::move(partitions)),
        variables_(std::move(variables)),
        records_(std::make_unique<ServerRecords>(NumRows(sizes_))) {}

  const ServerSettings& settings() const { return settings_; }
  const std::vector<Piece>& pieces() const { return settings_.pieces; }
  bool has_fetched_steps() const { return settings_.has_fetched_steps; }
  // The sizes of the shards, which messages must match.
  const std::vector<PieceSize>& sizes() const { return sizes_; }
  // A partition for each shard that contains only the rows of the shard.
  const std::vector<RowPartition>& partitions() const { return partitions_; }
  const Variables& variables() const { return variables_; }
  ServerRecords& records() const { return *records_; }
  // Returns an error if the variables of the server were replaced. An op that
  // writes variables calls this method after it has locked them.
  absl::Status CheckNotRetired() const;

  std::string DebugString() const override {
    return absl::StrCat("Server with ", settings_.pieces.size(), " shards");
  }

 private:
  static std::vector<int64_t> NumRows(const std::vector<PieceSize>& sizes) {
    std::vector<int64_t> num_rows;
    for (const PieceSize& size : sizes) num_rows.push_back(size.num_rows);
    return num_rows;
  }

  const ServerSettings settings_;
  const std::vector<PieceSize> sizes_;
  const std::vector<RowPartition> partitions_;
  const Variables variables_;
  const std::unique_ptr<ServerRecords> records_;
};

using ServerPtr = tensorflow::core::RefCountPtr<ServerResource>;

// Gets the server of a handle, also if it is retired.
absl::Status LookUpServer(tensorflow::OpKernelContext* ctx,
                          const tensorflow::Tensor& handle, ServerPtr* server);

// Gets the server of the input `server`, also if it is retired.
absl::Status LookUpServer(tensorflow::OpKernelContext* ctx, ServerPtr* server);

// Gets the server of the input `server`, and calls `CheckNotRetired`.
absl::Status GetServer(tensorflow::OpKernelContext* ctx, ServerPtr* server);

// Base class of ops that use the state of servers.
class ServerStateOp : public Kernel {
 public:
  explicit ServerStateOp(tensorflow::OpKernelConstruction* ctx);

 protected:
  // Partitions with one shard for the variables `applied` and `fetched_steps`.
  const RowPartition& applied_partition() const { return applied_partition_; }
  const RowPartition& fetched_partition() const { return fetched_partition_; }

 private:
  RowPartition applied_partition_;
  RowPartition fetched_partition_;
};

// Base class of ops with the inputs `server` and `request`. `Base` is
// `ServerStateOp` or a class that is derived from it.
template <typename Base>
class ServerOp : public Base {
 public:
  using Base::Base;

 protected:
  virtual absl::Status RunOn(tensorflow::OpKernelContext* ctx,
                             const ServerResource& server,
                             Span<const uint8_t> request) = 0;

 private:
  void Run(tensorflow::OpKernelContext* ctx) final {
    ServerPtr server;
    AlignedBytes request;
    OP_REQUIRES_OK(ctx, GetServer(ctx, &server));
    OP_REQUIRES_OK(ctx, request.Get(ctx, "request"));
    OP_REQUIRES_OK(ctx, RunOn(ctx, *server, request.bytes()));
  }
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_SERVERS_SERVER_RESOURCE_H_
