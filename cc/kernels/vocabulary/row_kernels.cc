// Kernels that write and read the rows of keys without a step of the engine.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/row_type.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/first_values.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/core/optimizers/optimizer.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/served_keys/fetched_steps.h"
#include "cc/core/served_keys/key_pieces.h"
#include "cc/core/servers/pieces.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/tables/gather.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/core/vocabulary/admit_keys.h"
#include "cc/core/vocabulary/first_rows.h"
#include "cc/core/vocabulary/write_keys.h"
#include "cc/kernels/changes/row_values.h"
#include "cc/kernels/engine/engine_resource.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "cc/kernels/servers/pieces_op.h"
#include "cc/kernels/servers/server_resource.h"
#include "cc/kernels/vocabulary/locked_first_rows.h"
#include "cc/kernels/vocabulary/locked_vocabulary.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"

namespace layoutmap {
namespace {

using tensorflow::DataType;
using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// A partition of the full table or vocabulary in which the shards of this op
// are preceded and followed by a shard without memory.
struct PlacedPartition {
  RowPartition own;
  RowPartition placed;

  // `sizes` are the sizes of the op's shards. The first shard begins at
  // `first`.
  absl::Status Make(const std::vector<int64_t>& sizes, int64_t first,
                    int64_t total) {
    std::vector<int64_t> own_offsets = {0}, offsets = {0, first};
    for (const int64_t size : sizes) {
      own_offsets.push_back(own_offsets.back() + size);
      offsets.push_back(offsets.back() + size);
    }
    if (offsets.back() > total) {
      return absl::InvalidArgumentError(absl::StrCat(
          "The shards must end at ", total, ". Received: ", offsets.back()));
    }
    offsets.push_back(total);
    TF_RETURN_IF_ERROR(
        ToTf(RowPartition::Make(Placement::kOffsets, own_offsets, &own)));
    return ToTf(RowPartition::Make(Placement::kOffsets, offsets, &placed));
  }

  // Converts a view of the op's shards to a view of all shards.
  template <typename T>
  void Place(ShardedView<T>* view) const {
    view->partition = &placed;
    view->shards.insert(view->shards.begin(), nullptr);
    view->shards.push_back(nullptr);
  }
};

class WriteKeysOp : public Kernel {
 public:
  explicit WriteKeysOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    std::string first_values;
    std::vector<float> limits;
    int64_t seed, num_buckets;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table", &table_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table_index", &table_index_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dtype", &dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_shards", &num_shards_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("first_bucket", &first_bucket_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("vocabulary_buckets", &num_buckets));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("has_sketch", &has_sketch_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("key_kind", &kind_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("first_values", &first_values));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("first_limits", &limits));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("first_seed", &seed));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("initial_slots", &initial_slots_));
    OP_REQUIRES_OK(ctx, ReadSharing(ctx));
    OP_REQUIRES(
        ctx, limits.size() == 2,
        absl::InvalidArgumentError(absl::StrCat(
            "`first_limits` must have two values. Received: ", limits.size())));
    OP_REQUIRES_OK(ctx, ToTf(BucketLayout::Make(num_buckets, &layout_)));
    OP_REQUIRES_OK(ctx, ToTf(ParseFirstValues(first_values, &values_.kind)));
    values_.a = limits[0];
    values_.b = limits[1];
    values_.seed = static_cast<uint64_t>(seed);
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor *keys, *last_steps, *counts;
    OpInputList engines, servers;
    EnginePtr resource;
    ServerPtr server;
    // The specs of the tables in `sharing`.
    std::vector<TableSpec> sharing;
    OP_REQUIRES_OK(ctx, GetInput(ctx, "keys", 1, &keys));
    OP_REQUIRES_OK(ctx, GetInput(ctx, "last_steps", 1, &last_steps));
    OP_REQUIRES_OK(ctx, GetInput(ctx, "counts", 1, &counts));
    OP_REQUIRES_OK(ctx, ctx->input_list("engine", &engines));
    OP_REQUIRES_OK(ctx, ctx->input_list("server", &servers));
    if (engines.size() > 0) {
      OP_REQUIRES_OK(ctx, FindEngine(ctx, engines[0], &resource, &sharing));
    } else if (servers.size() > 0) {
      OP_REQUIRES_OK(ctx, FindServer(ctx, servers[0], &server, &sharing));
    }
    OP_REQUIRES(ctx, resource || server || sharing_.empty(),
                absl::InvalidArgumentError(
                    "`sharing` must be empty without an engine or a server"));
    Locked locked;
    OP_REQUIRES_OK(ctx, LockTable(ctx, sharing, &locked));
    if (server) OP_REQUIRES_OK(ctx, server->CheckNotRetired());
    RowValues values;
    OP_REQUIRES_OK(ctx, ReadValues(ctx, locked, keys->NumElements(), &values));
    int32_t step = 0;
    OP_REQUIRES_OK(ctx, NewStep(ctx, locked, &step));
    const Span<const int64_t> written_keys = View<int64_t>(*keys);
    OP_REQUIRES_OK(ctx, CheckPlaces(locked, written_keys));
    Tensor* rows = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("rows", keys->shape(), &rows));
    WrittenKeys written;
    OP_REQUIRES_OK(
        ctx,
        ToTf(WriteKeys(
            layout_,
            {written_keys, View<int32_t>(*last_steps), View<int32_t>(*counts)},
            step, locked.state, MutableView<int64_t>(rows), &written)));
    WriteRowValues(locked.table, written, View<int64_t>(*rows), values,
                   TfParallelFor(ctx));
    // The views of the other tables and the engine count rows from the first
    // row of the shard.
    const int64_t first_row = first_bucket_ * kKeysPerBucket;
    std::vector<NewKey> new_keys = written.new_keys;
    for (NewKey& one : new_keys) one.row -= first_row;
    for (const FirstRows& other : locked.others) {
      WriteFirstRows(other, new_keys, TfParallelFor(ctx));
    }
    VocabularyCounts numbers;
    numbers.num_admitted = static_cast<int64_t>(written.new_keys.size());
    numbers.num_full = written.num_full;
    AddCounts(numbers, locked.numbers);
    locked.numbers[kVocabularyStep] = step;
    if (!written_keys.empty()) locked.numbers[kKeyKind] = kind_;
    if (resource) {
      const auto found = View<int64_t>(*rows);
      std::vector<int64_t> changed(found.begin(), found.end());
      for (int64_t& row : changed) {
        if (row != kNoRow) row -= first_row;
      }
      resource->changed().Note(table_index_, changed);
      for (const int32_t other : sharing_) {
        resource->changed().Note(other, changed);
      }
    }
    OP_REQUIRES_OK(ctx, SetScalar(ctx, "num_new", numbers.num_admitted));
  }

 private:
  // Reads the attributes of the other tables with the same vocabulary.
  absl::Status ReadSharing(OpKernelConstruction* ctx) {
    std::vector<std::string> kinds;
    std::vector<float> limits;
    std::vector<int64_t> seeds;
    TF_RETURN_IF_ERROR(ctx->GetAttr("sharing", &sharing_));
    TF_RETURN_IF_ERROR(ctx->GetAttr("sharing_first_values", &kinds));
    TF_RETURN_IF_ERROR(ctx->GetAttr("sharing_first_limits", &limits));
    TF_RETURN_IF_ERROR(ctx->GetAttr("sharing_first_seeds", &seeds));
    TF_RETURN_IF_ERROR(
        ctx->GetAttr("sharing_initial_slots", &sharing_initial_slots_));
    const size_t size = sharing_.size();
    if (kinds.size() != size || limits.size() != 2 * size ||
        seeds.size() != size) {
      return absl::InvalidArgumentError(absl::StrCat(
          "The lists about `sharing` must have the same size. Received: ", size,
          " tables and lists of other sizes"));
    }
    sharing_values_.resize(size);
    for (size_t i = 0; i < size; ++i) {
      FirstValues& values = sharing_values_[i];
      TF_RETURN_IF_ERROR(ToTf(ParseFirstValues(kinds[i], &values.kind)));
      values.a = limits[2 * i];
      values.b = limits[2 * i + 1];
      values.seed = static_cast<uint64_t>(seeds[i]);
    }
    return absl::OkStatus();
  }

  // Finds the server, and the specs of the shards in `sharing`.
  absl::Status FindServer(OpKernelContext* ctx, const Tensor& handle,
                          ServerPtr* server,
                          std::vector<TableSpec>* sharing) const {
    TF_RETURN_IF_ERROR(tensorflow::LookupResource(
        ctx, handle.scalar<tensorflow::ResourceHandle>()(), server));
    const std::vector<Piece>& pieces = (*server)->pieces();
    for (const int32_t other : sharing_) {
      if (other < 0 || other >= static_cast<int>(pieces.size())) {
        return absl::InvalidArgumentError(absl::StrCat(
            "`sharing` must be in [0, ", pieces.size(),
            ") on this server. Received: ", other, " (table '", table_, "')"));
      }
      TableSpec& spec = sharing->emplace_back();
      spec.name = pieces[other].table;
      spec.partition = (*server)->partitions()[other];
      spec.dim = pieces[other].dim;
      spec.optimizer = pieces[other].optimizer;
      spec.row_type = pieces[other].row_type;
    }
    return absl::OkStatus();
  }

  // Finds the engine, and the specs of the tables in `sharing`.
  absl::Status FindEngine(OpKernelContext* ctx, const Tensor& handle,
                          EnginePtr* engine,
                          std::vector<TableSpec>* sharing) const {
    TF_RETURN_IF_ERROR(tensorflow::LookupResource(
        ctx, handle.scalar<tensorflow::ResourceHandle>()(), engine));
    TF_RETURN_IF_ERROR((*engine)->CheckNotRetired());
    const std::vector<TableSpec>& tables = (*engine)->engine().config().tables;
    if (table_index_ < 0 || table_index_ >= static_cast<int>(tables.size())) {
      return absl::InvalidArgumentError(
          absl::StrCat("`table_index` must be in [0, ", tables.size(),
                       "). Received: ", table_index_));
    }
    // The engine records the changed rows, so it must have all of these rows.
    const int64_t num_rows = tables[table_index_].partition.num_rows();
    const int64_t shard_of = (*engine)->vocabulary_buckets(table_index_);
    const int64_t most = shard_of > 0 ? shard_of : num_rows / kKeysPerBucket;
    if (layout_.num_buckets() > most) {
      return absl::InvalidArgumentError(
          absl::StrCat("`vocabulary_buckets` must be at most ", most,
                       ", as in the engine. Received: ", layout_.num_buckets(),
                       " (table '", table_, "')"));
    }
    for (const int32_t other : sharing_) {
      if (other < 0 || other >= static_cast<int>(tables.size()) ||
          tables[other].partition.num_rows() != num_rows) {
        return absl::InvalidArgumentError(absl::StrCat(
            "`sharing` must be tables of the engine with ", num_rows,
            " rows. Received: ", other, " (table '", table_, "')"));
      }
      sharing->push_back(tables[other]);
    }
    return absl::OkStatus();
  }

  // The variables of the table. Objects cannot be moved, because the views
  // point to the partitions.
  struct Locked {
    LockedShards shards;
    PlacedPartition buckets;
    PlacedPartition rows;
    // The partition of the rows including the row for unknown keys.
    RowPartition own_rows;
    int64_t num_buckets = 0;
    VocabularyState state;
    FirstRows table;
    // The other tables with the same vocabulary.
    std::vector<FirstRows> others;
    Span<int64_t> numbers;
    // The number of steps since the oldest pending step of a server.
    int64_t oldest_age = 0;
  };

  // `others` are the specs of the tables in `sharing`. They must exist as long
  // as `locked`.
  absl::Status LockTable(OpKernelContext* ctx,
                         const std::vector<TableSpec>& others,
                         Locked* locked) const {
    LockedShards& shards = locked->shards;
    TF_RETURN_IF_ERROR(shards.Lock(
        ctx, {"state", "shards", "slots", "sharing_shards", "fetched_steps"},
        LockedShards::Mode::kExclusive));
    OpInputList fetched, sharing;
    TF_RETURN_IF_ERROR(ctx->input_list("fetched_steps", &fetched));
    TF_RETURN_IF_ERROR(ctx->input_list("sharing_shards", &sharing));
    const int num_state = 3 * num_shards_ + (has_sketch_ ? 2 : 0) + 1;
    const int num_slots = static_cast<int>(initial_slots_.size());
    TF_RETURN_IF_ERROR(CheckNumVariables(
        absl::StrCat("Table '", table_, "' needs"), "state, shards and slots",
        num_state + (1 + num_slots) * num_shards_,
        shards.size() - fetched.size() - sharing.size()));
    TF_RETURN_IF_ERROR(MakePartitions(num_state, locked));
    TF_RETURN_IF_ERROR(MakeState(ctx, num_state, locked));
    TF_RETURN_IF_ERROR(MakeTable(ctx, num_state, locked));
    TF_RETURN_IF_ERROR(
        MakeOthers(ctx, others, shards.size() - fetched.size() - sharing.size(),
                   sharing.size(), locked));
    return fetched.size() == 0 ? absl::OkStatus()
                               : ReadPending(ctx, shards.size() - 1, locked);
  }

  absl::Status MakePartitions(int num_state, Locked* locked) const {
    std::vector<int64_t> buckets, rows, offsets = {0};
    for (int s = 0; s < num_shards_; ++s) {
      int64_t num_buckets, num_rows;
      TF_RETURN_IF_ERROR(
          locked->shards.NumRows(s, table_ + " (keys)", &num_buckets));
      TF_RETURN_IF_ERROR(
          locked->shards.NumRows(num_state + s, table_, &num_rows));
      buckets.push_back(num_buckets);
      rows.push_back(num_buckets * kKeysPerBucket);
      // The last shard of a table has one more row, for unknown keys.
      if (num_rows != rows.back() && num_rows != rows.back() + 1) {
        return absl::InvalidArgumentError(
            absl::StrCat("Shard ", s, " of table '", table_, "' must have ",
                         rows.back(), " rows. Received: ", num_rows));
      }
      offsets.push_back(offsets.back() + num_rows);
      locked->num_buckets += num_buckets;
    }
    TF_RETURN_IF_ERROR(
        locked->buckets.Make(buckets, first_bucket_, layout_.num_buckets()));
    TF_RETURN_IF_ERROR(locked->rows.Make(rows, first_bucket_ * kKeysPerBucket,
                                         layout_.num_rows()));
    return ToTf(
        RowPartition::Make(Placement::kOffsets, offsets, &locked->own_rows));
  }

  absl::Status MakeState(OpKernelContext* ctx, int num_state,
                         Locked* locked) const {
    const TensorShape bucket({kKeysPerBucket});
    LockedShards& shards = locked->shards;
    VocabularyState& state = locked->state;
    const RowPartition& own = locked->buckets.own;
    TF_RETURN_IF_ERROR(shards.MutableView(ctx, 0, table_ + " (keys)", own,
                                          bucket, &state.keys));
    TF_RETURN_IF_ERROR(shards.MutableView(ctx, num_shards_,
                                          table_ + " (last_step)", own, bucket,
                                          &state.last_step));
    TF_RETURN_IF_ERROR(shards.MutableView(
        ctx, 2 * num_shards_, table_ + " (count)", own, bucket, &state.count));
    locked->buckets.Place(&state.keys);
    locked->buckets.Place(&state.last_step);
    locked->buckets.Place(&state.count);
    ShardedView<int64_t> numbers;
    RowPartition whole;
    TF_RETURN_IF_ERROR(OneShard(kNumVocabularyNumbers, &whole));
    TF_RETURN_IF_ERROR(shards.MutableView(
        ctx, num_state - 1, table_ + " (numbers)", whole, {}, &numbers));
    locked->numbers = {numbers.shards[0], kNumVocabularyNumbers};
    return CheckKeyKind(table_, locked->numbers, static_cast<KeyKind>(kind_));
  }

  absl::Status MakeTable(OpKernelContext* ctx, int first,
                         Locked* locked) const {
    LockedShards& shards = locked->shards;
    FirstRows& table = locked->table;
    OpInputList slot_values;
    const Tensor* rows;
    TF_RETURN_IF_ERROR(GetInput(ctx, "values", 2, &rows));
    TF_RETURN_IF_ERROR(ctx->input_list("slot_values", &slot_values));
    TF_RETURN_IF_ERROR(CheckNumVariables(
        absl::StrCat("Table '", table_, "' needs"), "slot_values",
        static_cast<int64_t>(initial_slots_.size()), slot_values.size()));
    table.values = values_;
    table.slot_values = initial_slots_;
    table.row_type = dtype_ == tensorflow::DT_FLOAT      ? RowType::kFloat32
                     : dtype_ == tensorflow::DT_BFLOAT16 ? RowType::kBfloat16
                                                         : RowType::kFloat16;
    const TensorShape row_shape({rows->dim_size(1)});
    if (table.row_type == RowType::kFloat32) {
      TF_RETURN_IF_ERROR(shards.MutableView(
          ctx, first, table_, locked->own_rows, row_shape, &table.table));
      locked->rows.Place(&table.table);
    } else {
      TF_RETURN_IF_ERROR(shards.MutableView(ctx, first, table_,
                                            locked->own_rows, row_shape,
                                            &table.half_table, dtype_));
      locked->rows.Place(&table.half_table);
    }
    table.slots.resize(initial_slots_.size());
    for (int j = 0; j < slot_values.size(); ++j) {
      first += num_shards_;
      TF_RETURN_IF_ERROR(CheckRank("slot_values", slot_values[j], 2));
      TF_RETURN_IF_ERROR(shards.MutableView(
          ctx, first, table_ + " (slot variable)", locked->own_rows,
          TensorShape({slot_values[j].dim_size(1)}), &table.slots[j]));
      locked->rows.Place(&table.slots[j]);
    }
    return absl::OkStatus();
  }

  // Locks the tables in `sharing`, whose variables begin at `first`.
  absl::Status MakeOthers(OpKernelContext* ctx,
                          const std::vector<TableSpec>& others, int first,
                          int num_variables, Locked* locked) const {
    int expected = 0;
    for (const TableSpec& table : others) {
      if (table.partition.num_rows() != locked->own_rows.num_rows()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "`sharing` must be tables with ", locked->own_rows.num_rows(),
            " rows. Received: ", table.partition.num_rows(), " (table '",
            table.name, "')"));
      }
      expected += table.partition.num_shards() *
                  (1 + static_cast<int>(NumSlots(table.optimizer)));
    }
    TF_RETURN_IF_ERROR(CheckNumVariables(
        absl::StrCat("Tables that share the vocabulary of '", table_, "' need"),
        "sharing_shards", expected, num_variables));
    size_t next_value = 0;
    locked->others.resize(others.size());
    for (size_t i = 0; i < others.size(); ++i) {
      const TableSpec& table = others[i];
      TF_RETURN_IF_ERROR(LockFirstRows(ctx, &locked->shards, first, table,
                                       sharing_values_[i], &locked->others[i]));
      first += table.partition.num_shards();
      TF_RETURN_IF_ERROR(LockFirstSlots(
          ctx, &locked->shards, &first, table, "sharing_initial_slots",
          sharing_initial_slots_, &next_value, &locked->others[i]));
    }
    return absl::OkStatus();
  }

  absl::Status ReadPending(OpKernelContext* ctx, int which,
                           Locked* locked) const {
    RowPartition whole;
    ShardedView<int64_t> fetched;
    TF_RETURN_IF_ERROR(OneShard(FetchedSteps::kSize, &whole));
    TF_RETURN_IF_ERROR(locked->shards.MutableView(ctx, which, kFetchedSteps,
                                                  whole, {}, &fetched));
    locked->oldest_age =
        FetchedSteps({fetched.shards[0], whole.num_rows()}).OldestAge();
    return absl::OkStatus();
  }

  // Gets the step of the vocabulary after this op.
  absl::Status NewStep(OpKernelContext* ctx, const Locked& locked,
                       int32_t* step) const {
    int64_t least;
    int32_t next;
    TF_RETURN_IF_ERROR(GetScalar(ctx, "step", &least));
    TF_RETURN_IF_ERROR(NextVocabularyStep(table_, locked.numbers, &next));
    *step = next - 1;
    if (least <= *step) return absl::OkStatus();
    if (least >= INT32_MAX - 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("`step` must be at most 2^31 - 3. Received: ", least));
    }
    // A server identifies the rows of pending steps by the number of steps
    // since, which a jump of the step number would change.
    if (locked.oldest_age > 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("The step of table '", table_,
                       "' cannot be set while a step is in flight; finish the "
                       "steps first"));
    }
    *step = static_cast<int32_t>(least);
    return absl::OkStatus();
  }

  absl::Status CheckPlaces(const Locked& locked,
                           Span<const int64_t> keys) const {
    if (locked.num_buckets == layout_.num_buckets()) return absl::OkStatus();
    KeyPiece piece;
    piece.table = table_;
    piece.layout = layout_;
    piece.first_bucket = first_bucket_;
    piece.num_buckets = locked.num_buckets;
    TF_RETURN_IF_ERROR(ToTf(CheckKeyPiece(piece)));
    return ToTf(CheckKeysOf(piece, keys));
  }

  // Reads the values of the rows and slot variables. Tensors without rows mean
  // that the values are not written.
  absl::Status ReadValues(OpKernelContext* ctx, const Locked& locked,
                          int64_t num_keys, RowValues* values) const {
    const Tensor* rows;
    OpInputList slots;
    TF_RETURN_IF_ERROR(GetInput(ctx, "values", 2, &rows));
    TF_RETURN_IF_ERROR(ctx->input_list("slot_values", &slots));
    const auto check = [&](const char* name, const Tensor& value) {
      if (value.dim_size(0) == 0 || value.dim_size(0) == num_keys) {
        return absl::OkStatus();
      }
      return absl::InvalidArgumentError(
          absl::StrCat("`", name, "` must have one row for each of ", num_keys,
                       " keys. Received: ", value.dim_size(0)));
    };
    TF_RETURN_IF_ERROR(check("values", *rows));
    if (rows->NumElements() > 0) values->rows = rows->data();
    for (int j = 0; j < slots.size(); ++j) {
      TF_RETURN_IF_ERROR(check("slot_values", slots[j]));
      values->slots.push_back(
          slots[j].NumElements() > 0 ? View<float>(slots[j]).data() : nullptr);
    }
    return absl::OkStatus();
  }

  std::string table_;
  int32_t table_index_;
  DataType dtype_;
  int num_shards_;
  int64_t first_bucket_;
  bool has_sketch_;
  int32_t kind_;
  BucketLayout layout_;
  FirstValues values_;
  std::vector<float> initial_slots_;
  // Other tables of the engine, or shards of the server, with the same
  // vocabulary.
  std::vector<int32_t> sharing_;
  std::vector<FirstValues> sharing_values_;
  std::vector<float> sharing_initial_slots_;
};

class ReadKeysOp : public Kernel {
 public:
  explicit ReadKeysOp(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table", &table_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("Tvalues", &dtypes_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dims", &dims_));
    OP_REQUIRES(ctx, dims_.size() == dtypes_.size(),
                absl::InvalidArgumentError(absl::StrCat(
                    "`dims` must have one value for each of ", dtypes_.size(),
                    " `values`. Received: ", dims_.size())));
  }

  void Run(OpKernelContext* ctx) override {
    int64_t begin, end;
    OP_REQUIRES_OK(ctx, GetScalar(ctx, "begin", &begin));
    OP_REQUIRES_OK(ctx, GetScalar(ctx, "end", &end));
    // All values are copied under one lock, so that a concurrent step cannot
    // assign a row to another key between two copies.
    LockedShards locked;
    OP_REQUIRES_OK(ctx, locked.Lock(ctx, {"lanes", "shards"},
                                    LockedShards::Mode::kShared));
    RowPartition buckets;
    int64_t num_buckets;
    OP_REQUIRES_OK(ctx, locked.NumRows(0, table_ + " (keys)", &num_buckets));
    OP_REQUIRES_OK(ctx, OneShard(num_buckets, &buckets));
    OP_REQUIRES(ctx, begin >= 0 && begin <= end && end <= num_buckets,
                absl::InvalidArgumentError(absl::StrCat(
                    "`begin` and `end` must be a range in [0, ", num_buckets,
                    "]. Received: ", begin, ", ", end)));
    ShardedView<const int64_t> keys;
    OP_REQUIRES_OK(ctx, locked.View(0, table_ + " (keys)", buckets,
                                    {kKeysPerBucket}, &keys));
    std::vector<int64_t> rows;
    for (int64_t row = begin * kKeysPerBucket; row < end * kKeysPerBucket;
         ++row) {
      if (keys.shards[0][row] != kEmptyKey) rows.push_back(row);
    }
    OP_REQUIRES_OK(ctx,
                   CopyLane<int64_t>(ctx, locked, 0, "keys", buckets, rows));
    OP_REQUIRES_OK(
        ctx, CopyLane<int32_t>(ctx, locked, 1, "last_steps", buckets, rows));
    OP_REQUIRES_OK(ctx,
                   CopyLane<int32_t>(ctx, locked, 2, "counts", buckets, rows));
    OP_REQUIRES_OK(ctx, CopyValues(ctx, locked, rows));
  }

 private:
  template <typename T>
  absl::Status CopyLane(OpKernelContext* ctx, const LockedShards& locked,
                        int which, const char* output,
                        const RowPartition& buckets,
                        const std::vector<int64_t>& rows) const {
    ShardedView<const T> lanes;
    TF_RETURN_IF_ERROR(locked.View(which, table_ + " (vocabulary)", buckets,
                                   {kKeysPerBucket}, &lanes));
    Tensor* copy = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(
        output, TensorShape({static_cast<int64_t>(rows.size())}), &copy));
    T* to = copy->flat<T>().data();
    for (const int64_t row : rows) *to++ = lanes.shards[0][row];
    return absl::OkStatus();
  }

  absl::Status CopyValues(OpKernelContext* ctx, const LockedShards& locked,
                          const std::vector<int64_t>& rows) const {
    constexpr int kNumLanes = 3;
    TF_RETURN_IF_ERROR(CheckNumVariables(
        absl::StrCat("Table '", table_, "' needs"), "shards",
        static_cast<int64_t>(dtypes_.size()), locked.size() - kNumLanes));
    OutputsInOrder outputs;
    TF_RETURN_IF_ERROR(outputs.Start(ctx, "values"));
    for (size_t v = 0; v < dtypes_.size(); ++v) {
      const int which = kNumLanes + static_cast<int>(v);
      int64_t num_rows;
      RowPartition partition;
      ShardedView<const char> view;
      Tensor* copy = nullptr;
      TF_RETURN_IF_ERROR(locked.NumRows(which, table_, &num_rows));
      if (!rows.empty() && rows.back() >= num_rows) {
        return absl::InvalidArgumentError(absl::StrCat(
            "`shards` must have a row for each key. Received: ", num_rows,
            " rows (table '", table_, "')"));
      }
      TF_RETURN_IF_ERROR(OneShard(num_rows, &partition));
      TF_RETURN_IF_ERROR(locked.ByteView(which, table_, partition, dtypes_[v],
                                         {dims_[v]}, &view));
      TF_RETURN_IF_ERROR(outputs.Allocate(
          dtypes_[v],
          TensorShape({static_cast<int64_t>(rows.size()), dims_[v]}), &copy));
      GatherRows<char>(view, Span<const int64_t>(rows), TfParallelFor(ctx),
                       static_cast<char*>(copy->data()));
    }
    return outputs.Finish();
  }

  std::string table_;
  std::vector<DataType> dtypes_;
  std::vector<int64_t> dims_;
};

LM_REGISTER_KERNEL("WriteKeys", WriteKeysOp);
LM_REGISTER_KERNEL("ReadKeys", ReadKeysOp);

}  // namespace
}  // namespace layoutmap
