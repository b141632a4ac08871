// The base class of all ops that access the shards of a server.

#ifndef TF_LAYOUTMAP_KERNELS_SERVERS_PIECES_OP_H_
#define TF_LAYOUTMAP_KERNELS_SERVERS_PIECES_OP_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/views.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/servers/applied_closures.h"
#include "cc/core/servers/messages.h"
#include "cc/core/servers/pieces.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/types.h"

namespace layoutmap {

// The names of variables in error messages.
constexpr char kApplied[] = "(closures applied)";
constexpr char kFetchedSteps[] = "(steps fetched)";

inline tensorflow::DataType DtypeOf(const Piece& piece) {
  switch (piece.row_type) {
    case RowType::kBfloat16:
      return tensorflow::DT_BFLOAT16;
    case RowType::kFloat16:
      return tensorflow::DT_HALF;
    case RowType::kFloat32:
      return tensorflow::DT_FLOAT;
  }
  return tensorflow::DT_FLOAT;
}

// Creates a partition with one shard, which contains all rows.
inline absl::Status OneShard(int64_t num_rows, RowPartition* partition) {
  const std::vector<int64_t> offsets = {0, num_rows};
  return ToTf(RowPartition::Make(Placement::kDiv, Span<const int64_t>(offsets),
                                 partition));
}

// Base class of ops that access all shards of a server.
class PiecesOp : public Kernel {
 public:
  explicit PiecesOp(tensorflow::OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadPieces(ctx));
    OP_REQUIRES_OK(ctx, OneShard(AppliedClosures::kSize, &applied_partition_));
  }

 protected:
  const std::vector<Piece>& pieces() const { return pieces_; }
  std::vector<Piece>* mutable_pieces() { return &pieces_; }
  const RowPartition& applied_partition() const { return applied_partition_; }

  // Reads a list attribute. Returns an error if it does not have one value for
  // each shard.
  template <typename T>
  absl::Status GetList(tensorflow::OpKernelConstruction* ctx, const char* name,
                       std::vector<T>* values) const {
    TF_RETURN_IF_ERROR(ctx->GetAttr(name, values));
    if (values->size() == pieces_.size()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("`", name, "` must have one value for each of ",
                     pieces_.size(), " shards. Received: ", values->size()));
  }

  // Reads the sizes of the shards, which messages must match. Creates a
  // partition for each shard that contains only the rows of the shard.
  absl::Status ReadSizes(const LockedShards& shards,
                         std::vector<RowPartition>* partitions,
                         std::vector<PieceSize>* sizes) const {
    partitions->resize(pieces_.size());
    for (size_t p = 0; p < pieces_.size(); ++p) {
      const Piece& piece = pieces_[p];
      int64_t num_rows;
      TF_RETURN_IF_ERROR(
          shards.NumRows(static_cast<int>(p), piece.table, &num_rows));
      TF_RETURN_IF_ERROR(OneShard(num_rows, &(*partitions)[p]));
      sizes->push_back(
          {piece.table, num_rows, piece.dim, piece.num_hyperparameters});
    }
    return absl::OkStatus();
  }

 private:
  absl::Status ReadPieces(tensorflow::OpKernelConstruction* ctx) {
    int32_t num_shards;
    std::vector<std::string> tables;
    std::vector<int64_t> dims;
    std::vector<tensorflow::DataType> dtypes;
    TF_RETURN_IF_ERROR(ctx->GetAttr("num_shards", &num_shards));
    pieces_.resize(num_shards);
    TF_RETURN_IF_ERROR(GetList(ctx, "tables", &tables));
    TF_RETURN_IF_ERROR(GetList(ctx, "dims", &dims));
    TF_RETURN_IF_ERROR(GetList(ctx, "dtypes", &dtypes));
    for (size_t p = 0; p < pieces_.size(); ++p) {
      if (dims[p] < 1) {
        return absl::InvalidArgumentError(
            absl::StrCat("`dims` must be at least 1. Received: ", dims[p],
                         " (table '", tables[p], "')"));
      }
      pieces_[p].table = tables[p];
      pieces_[p].dim = dims[p];
      pieces_[p].row_type =
          dtypes[p] == tensorflow::DT_BFLOAT16 ? RowType::kBfloat16
          : dtypes[p] == tensorflow::DT_HALF   ? RowType::kFloat16
                                               : RowType::kFloat32;
    }
    return absl::OkStatus();
  }

  std::vector<Piece> pieces_;
  RowPartition applied_partition_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_SERVERS_PIECES_OP_H_
