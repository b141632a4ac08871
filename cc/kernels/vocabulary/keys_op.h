// The base class of kernels that find the rows of keys or assign rows to new
// keys.

#ifndef TF_LAYOUTMAP_KERNELS_VOCABULARY_KEYS_OP_H_
#define TF_LAYOUTMAP_KERNELS_VOCABULARY_KEYS_OP_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/engine/key_batches.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/core/ids/row_groups.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/find_keys.h"
#include "cc/core/keys/merged_keys.h"
#include "cc/core/memory/raw_array.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/core/vocabulary/admit_keys.h"
#include "cc/core/vocabulary/first_rows.h"
#include "cc/kernels/changes/row_values.h"
#include "cc/kernels/engine/engine_resource.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "cc/kernels/vocabulary/kept_changes.h"
#include "cc/kernels/vocabulary/key_inputs.h"
#include "cc/kernels/vocabulary/locked_first_rows.h"
#include "cc/kernels/vocabulary/locked_vocabulary.h"
#include "cc/kernels/vocabulary/open_table_specs.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_requires.h"
#include "tensorflow/core/framework/tensor.h"

namespace layoutmap {

// A table with an open vocabulary in the current step. The locks of all its
// variables are held. If several tables share a vocabulary, only its owner has
// the fields about the vocabulary.
struct LockedOpenTable {
  FirstRows first_rows;
  TableKeys keys;
  // The rows of the keys. Empty if the rows are the first values of the owner's
  // `rows`, which is always the case for the owner.
  RawArray<int64_t> other_rows;
  LockedVocabulary vocabulary;
  // The indices of the tables that share the vocabulary, and their keys. Empty
  // if the vocabulary has one table.
  std::vector<size_t> sharing;
  MergedKeys merged;
  // The rows of `counted_keys`.
  RawArray<int64_t> rows;
  std::vector<int64_t> pinned_rows;
  VocabularyStep step;
  // The kind of the keys of this step.
  KeyKind kind = kNoKeysYet;
  AdmittedKeys admitted;
  // Memory of `admitted.new_keys` for a shard.
  std::vector<NewKey> own_new_keys;
  // Indices of the table's first shard and first slot variable in the locked
  // variables.
  int first_shard = 0;
  int first_slot = 0;

  bool is_shared() const { return !sharing.empty(); }
  // The keys that the vocabulary counts.
  Span<const int64_t> counted_keys() const {
    return is_shared() ? Span<const int64_t>(merged.keys) : keys.keys;
  }

  // Converts the rows that `AdmitKeys` has found to rows of this table, if the
  // table is a shard. `own_new_keys` must have enough memory for all new keys.
  void ToOwnRows() {
    const int64_t first = vocabulary.buckets().first_row();
    if (first == 0) return;
    for (int64_t& row : Span<int64_t>(rows)) {
      if (row != kNoRow) row -= first;
    }
    own_new_keys.assign(admitted.new_keys.begin(), admitted.new_keys.end());
    for (NewKey& one : own_new_keys) one.row -= first;
    admitted.new_keys = {own_new_keys.data(),
                         static_cast<int64_t>(own_new_keys.size())};
    RowGroups& groups = *admitted.groups;
    for (const RowGroups::Part& part : groups.parts) {
      for (int64_t u = part.first; u < part.first + part.num_rows; ++u) {
        groups.rows[u] -= static_cast<uint32_t>(first);
      }
    }
  }
};

// How a training step admits keys, for ops that admit keys of shards.
struct AdmissionOptions {
  // Whether the change can be undone even if no evicted keys are reported.
  bool keeps_change = false;
  // Number of preceding vocabulary steps whose rows are not evicted.
  int32_t num_earlier = 0;
};

class KeysOp : public Kernel {
 public:
  explicit KeysOp(tensorflow::OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadOpenTableSpecs(ctx, &specs_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("slot_values", &slot_values_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("telling", &telling_));
    for (const int32_t place : telling_) {
      OP_REQUIRES(
          ctx, place >= 0 && place < static_cast<int32_t>(specs_.size()),
          absl::InvalidArgumentError(absl::StrCat(
              "`telling` must be indices into `open_tables`. Received: ",
              place)));
    }
  }

 protected:
  // Reads `num_replicas` batches and finds the rows of their keys.
  template <typename Enqueue>
  absl::Status FindRows(tensorflow::OpKernelContext* ctx,
                        EngineResource& resource, int32_t num_replicas,
                        bool training, const Enqueue& enqueue) {
    const EngineConfig& config = resource.engine().config();
    std::vector<std::vector<FeatureInput<int64_t>>> inputs;
    TF_RETURN_IF_ERROR(ReadKeyInputs(ctx, config, num_replicas, &inputs));
    return FindRowsOf(ctx, resource, config, inputs, training, {}, enqueue);
  }

  // Finds the rows of the keys of batches. If `training` is true, assigns rows
  // to new keys. Then calls `enqueue(batches, forget)`, while the locks prevent
  // other steps from reusing the rows. `enqueue` must set `forget` to a
  // function that removes the step from the engine. `config` has the tables of
  // the engine and the features of `inputs`.
  template <typename Enqueue>
  absl::Status FindRowsOf(
      tensorflow::OpKernelContext* ctx, EngineResource& resource,
      const EngineConfig& config,
      const std::vector<std::vector<FeatureInput<int64_t>>>& inputs,
      bool training, const AdmissionOptions& options, const Enqueue& enqueue) {
    std::vector<bool> is_open(config.tables.size());
    for (const OpenTableSpec& spec : specs_) {
      if (spec.table < 0 ||
          spec.table >= static_cast<int32_t>(is_open.size()) ||
          is_open[spec.table]) {
        return absl::InvalidArgumentError(absl::StrCat(
            "`open_tables` must be distinct tables of the engine. Received: ",
            spec.table));
      }
      is_open[spec.table] = true;
    }
    std::vector<KeyKind> kinds;
    TF_RETURN_IF_ERROR(ReadKeyKinds(ctx, specs_.size(), &kinds));
    KeyBatches batches;
    TF_RETURN_IF_ERROR(
        ToTf(KeyBatches::Make(config, is_open, inputs, &batches)));
    const bool keeps_changes = !telling_.empty() || options.keeps_change;
    LockedShards locked;
    std::vector<KeptChange> changes;
    const auto finish = [&] {
      std::function<Status()> forget;
      TF_RETURN_IF_ERROR(enqueue(batches.Finish(), &forget));
      if (keeps_changes) {
        KeepChanges(&resource, std::move(changes), std::move(forget));
      }
      return absl::OkStatus();
    };
    if (training) {
      std::deque<LockedOpenTable> tables(specs_.size());
      for (size_t i = 0; i < kinds.size(); ++i) tables[i].kind = kinds[i];
      TF_RETURN_IF_ERROR(locked.Lock(ctx, {"state", "shards", "slots"},
                                     LockedShards::Mode::kExclusive));
      TF_RETURN_IF_ERROR(LockTables(ctx, resource, &locked, &tables));
      if (keeps_changes) changes.resize(specs_.size());
      TF_RETURN_IF_ERROR(
          Admit(ctx, resource, locked, options, &batches, &tables, &changes));
      return finish();
    }
    TF_RETURN_IF_ERROR(
        locked.Lock(ctx, {"state"}, LockedShards::Mode::kShared));
    TF_RETURN_IF_ERROR(Find(ctx, resource, locked, &batches));
    TF_RETURN_IF_ERROR(OutputNoneEvicted(ctx, config, locked));
    return finish();
  }

  // Sets the output `evicted` to no keys.
  absl::Status OutputNoneEvicted(tensorflow::OpKernelContext* ctx,
                                 const EngineConfig& config,
                                 const LockedShards& locked) const {
    std::deque<LockedOpenTable> unchanged(specs_.size());
    std::vector<KeptChange> changes(telling_.empty() ? 0 : specs_.size());
    return OutputEvicted(ctx, config, locked, &unchanged, &changes);
  }

  const std::vector<OpenTableSpec>& specs() const { return specs_; }
  // Gives all unknown keys a row that is not in the table, so that they stay in
  // the batches.
  void KeepUnknownKeys() {
    for (OpenTableSpec& spec : specs_) spec.has_unknown_row = true;
  }

 private:
  absl::Status LockTables(tensorflow::OpKernelContext* ctx,
                          EngineResource& resource, LockedShards* locked,
                          std::deque<LockedOpenTable>* tables) const {
    const EngineConfig& config = resource.engine().config();
    int first = 0;
    for (size_t i = 0; i < specs_.size(); ++i) {
      const TableSpec& table = config.tables[specs_[i].table];
      if (!IsOwner(i)) {
        TF_RETURN_IF_ERROR(CheckSharing(config, i));
        LockedOpenTable& owner = (*tables)[specs_[i].owner];
        if (owner.sharing.empty()) owner.sharing.push_back(specs_[i].owner);
        owner.sharing.push_back(i);
        continue;
      }
      TF_RETURN_IF_ERROR((*tables)[i].vocabulary.Make(
          ctx, locked, first, table,
          resource.vocabulary_buckets(specs_[i].table), specs_[i].policy));
      first +=
          NumStateVariables(specs_[i].policy, table.partition.num_shards());
    }
    for (size_t i = 0; i < specs_.size(); ++i) {
      const TableSpec& table = config.tables[specs_[i].table];
      (*tables)[i].first_shard = first;
      TF_RETURN_IF_ERROR(LockFirstRows(ctx, locked, first, table,
                                       specs_[i].values,
                                       &(*tables)[i].first_rows));
      first += table.partition.num_shards();
    }
    size_t next_value = 0;
    for (size_t i = 0; i < specs_.size(); ++i) {
      const TableSpec& table = config.tables[specs_[i].table];
      (*tables)[i].first_slot = first;
      TF_RETURN_IF_ERROR(LockFirstSlots(ctx, locked, &first, table,
                                        "slot_values", slot_values_,
                                        &next_value, &(*tables)[i].first_rows));
    }
    return CheckNumVariables("The open tables need", "state, shards and slots",
                             first, locked->size());
  }

  // Runs a training step on all vocabularies. All checks run before any
  // vocabulary is changed, except for the check that all keys get rows. If this
  // check fails for one table, the changes of all tables are undone.
  absl::Status Admit(tensorflow::OpKernelContext* ctx, EngineResource& resource,
                     const LockedShards& locked,
                     const AdmissionOptions& options, KeyBatches* batches,
                     std::deque<LockedOpenTable>* tables,
                     std::vector<KeptChange>* changes) const {
    bool may_fail = false;
    for (const OpenTableSpec& spec : specs_) {
      may_fail |= spec.policy.fails_when_full;
    }
    for (size_t i = 0; i < specs_.size(); ++i) {
      LockedOpenTable& table = (*tables)[i];
      table.keys = batches->KeysOf(specs_[i].table);
      const LockedOpenTable& owner = (*tables)[specs_[i].owner];
      TF_RETURN_IF_ERROR(CheckSameKind(i, *tables));
      TF_RETURN_IF_ERROR(owner.vocabulary.CheckKind(table.kind));
    }
    for (size_t i = 0; i < specs_.size(); ++i) {
      if (!IsOwner(i)) continue;
      LockedOpenTable& table = (*tables)[i];
      std::vector<int32_t> sharing = {specs_[i].table};
      std::vector<Span<const int64_t>> keys;
      for (const size_t other : table.sharing) {
        if (other != i) sharing.push_back(specs_[other].table);
        keys.push_back((*tables)[other].keys.keys);
      }
      if (table.is_shared()) {
        TF_RETURN_IF_ERROR(CheckNumKeys(keys, table.vocabulary.table()));
        table.merged = MergeKeys(keys);
        // The memory is allocated before the vocabulary changes.
        for (size_t j = 0; j < keys.size(); ++j) {
          (*tables)[table.sharing[j]].other_rows =
              RawArray<int64_t>(table.merged.places[j].size());
        }
      }
      TF_RETURN_IF_ERROR(table.vocabulary.NextStep(&table.step.number));
      RowsInFlight in_flight = FindRowsInFlightOf(
          resource.engine(), resource.tokens(), resource.row_steps(), sharing);
      table.pinned_rows = std::move(in_flight.pinned_rows);
      for (int64_t& row : table.pinned_rows) {
        row += table.vocabulary.buckets().first_row();
      }
      table.step.pinned_rows = table.pinned_rows;
      table.step.oldest_in_flight =
          std::min(in_flight.oldest_step,
                   std::max(table.step.number - options.num_earlier, 1));
      // The old state is also required to undo the step if the memory for the
      // evicted rows cannot be allocated.
      table.step.keeps_old =
          (may_fail && specs_.size() > 1) || !changes->empty();
      table.rows = RawArray<int64_t>(table.counted_keys().size());
      if (table.vocabulary.buckets().is_shard) {
        table.own_new_keys.reserve(table.counted_keys().size());
      }
    }
    const ParallelFor parallel_for = TfParallelFor(ctx);
    const auto take_back = [&](size_t num_tables) {
      for (size_t i = 0; i < num_tables; ++i) {
        LockedOpenTable& table = (*tables)[i];
        if (IsOwner(i)) table.admitted.take_back(table.vocabulary.state());
      }
    };
    for (size_t i = 0; i < specs_.size(); ++i) {
      if (!IsOwner(i)) continue;
      LockedOpenTable& table = (*tables)[i];
      const LockedVocabulary& vocabulary = table.vocabulary;
      const Status status =
          AdmitKeys(vocabulary.layout(), vocabulary.policy(), table.step,
                    table.counted_keys(), parallel_for, vocabulary.state(),
                    table.rows, &table.admitted);
      if (status.ok()) {
        table.ToOwnRows();
        continue;
      }
      take_back(i);
      return ToTf(Status(status.code(), status.message() + " (table '" +
                                            vocabulary.table() + "')"));
    }
    FindOtherRows(tables);
    const absl::Status output_status = CatchAllTf([&] {
      return OutputEvicted(ctx, resource.engine().config(), locked, tables,
                           changes);
    });
    if (!output_status.ok()) {
      take_back(specs_.size());
      return output_status;
    }
    for (size_t i = 0; i < specs_.size(); ++i) {
      LockedOpenTable& table = (*tables)[i];
      LockedOpenTable& owner = (*tables)[specs_[i].owner];
      WriteFirstRows(table.first_rows, owner.admitted.new_keys, parallel_for);
      if (IsOwner(i)) {
        owner.vocabulary.CountStep(owner.step.number, owner.kind,
                                   owner.admitted.counts);
        if (!changes->empty()) {
          const Span<int64_t> numbers = owner.vocabulary.numbers();
          (*changes)[i].numbers_after.assign(numbers.begin(), numbers.end());
        }
        resource.changed().Note(specs_[i].table, Span<int64_t>(table.rows));
      } else {
        // Updates record the rows that they write.
        resource.changed().Note(specs_[i].table,
                                RowsOf(owner.admitted.new_keys));
      }
      // The groups of a shared vocabulary contain the keys of several tables,
      // so the engine finds the unique rows of each table.
      batches->TakeRows(specs_[i].table, RowsOfKeys(owner, table),
                        UnknownRow(specs_[i], owner.vocabulary.layout()),
                        owner.step.number,
                        owner.is_shared() ? nullptr : owner.admitted.groups);
    }
    return absl::OkStatus();
  }

  bool IsOwner(size_t i) const { return specs_[i].owner == i; }

  // Returns an error if table `i` cannot use the vocabulary of its owner.
  absl::Status CheckSharing(const EngineConfig& config, size_t i) const {
    const TableSpec& table = config.tables[specs_[i].table];
    const TableSpec& owner = config.tables[specs_[specs_[i].owner].table];
    if (table.partition.num_rows() != owner.partition.num_rows()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "Tables that share a vocabulary must have the same number of rows. "
          "Received: ",
          owner.partition.num_rows(), " (table '", owner.name, "') and ",
          table.partition.num_rows(), " (table '", table.name, "')"));
    }
    return absl::OkStatus();
  }

  // Returns an error if the keys of table `i` and of the owner of its
  // vocabulary have different kinds.
  absl::Status CheckSameKind(size_t i,
                             const std::deque<LockedOpenTable>& tables) const {
    const LockedOpenTable& owner = tables[specs_[i].owner];
    if (tables[i].kind == owner.kind) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("The keys of tables that share the vocabulary of table '",
                     owner.vocabulary.table(),
                     "' must be of one kind in each step. Received: kinds ",
                     owner.kind, " and ", tables[i].kind));
  }

  static absl::Status CheckNumKeys(const std::vector<Span<const int64_t>>& keys,
                                   const std::string& table) {
    int64_t num_keys = 0;
    for (const Span<const int64_t> each : keys) num_keys += each.size();
    if (num_keys < std::numeric_limits<uint32_t>::max() - 1) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "A step must have at most 2^32 - 3 keys of one vocabulary. Received: ",
        num_keys, " (table '", table, "')"));
  }

  // Sets `other_rows` of all tables.
  void FindOtherRows(std::deque<LockedOpenTable>* tables) const {
    for (size_t i = 0; i < specs_.size(); ++i) {
      const LockedOpenTable& owner = (*tables)[i];
      for (size_t j = 0; j < owner.sharing.size(); ++j) {
        const RawArray<uint32_t>& places = owner.merged.places[j];
        RawArray<int64_t>& rows = (*tables)[owner.sharing[j]].other_rows;
        for (int64_t k = 0; k < places.size(); ++k) {
          rows[k] = owner.rows[places[k]];
        }
      }
    }
  }

  static Span<const int64_t> RowsOfKeys(const LockedOpenTable& owner,
                                        const LockedOpenTable& table) {
    if (table.other_rows.size() > 0) return Span<int64_t>(table.other_rows);
    return {owner.rows.data(), table.keys.keys.size()};
  }

  static std::vector<int64_t> RowsOf(Span<const NewKey> new_keys) {
    std::vector<int64_t> rows;
    for (const NewKey& one : new_keys) rows.push_back(one.row);
    return rows;
  }

  // Writes the evicted keys and their rows to the outputs. Must be called
  // before the initial values of new keys overwrite the rows. If the caller
  // keeps changes, `changes` has one element for each table, which receives the
  // change of the table. Otherwise, `changes` is empty.
  absl::Status OutputEvicted(tensorflow::OpKernelContext* ctx,
                             const EngineConfig& config,
                             const LockedShards& locked,
                             std::deque<LockedOpenTable>* tables,
                             std::vector<KeptChange>* changes) const {
    OutputsInOrder outputs;
    TF_RETURN_IF_ERROR(outputs.Start(ctx, "evicted"));
    for (size_t i = 0; i < changes->size(); ++i) {
      LockedOpenTable& table = (*tables)[i];
      const LockedOpenTable& owner = (*tables)[specs_[i].owner];
      KeptChange& change = (*changes)[i];
      const TableSpec& spec = config.tables[specs_[i].table];
      change.table = specs_[i].table;
      change.owns_vocabulary = IsOwner(i);
      change.policy = specs_[i].policy;
      if (change.owns_vocabulary) {
        change.restore = table.admitted.take_back;
        const Span<int64_t> numbers = table.vocabulary.numbers();
        change.numbers_before.assign(numbers.begin(), numbers.end());
      }
      for (int64_t row : Span<int64_t>(owner.rows)) {
        if (row != kNoRow) change.touched.push_back(row);
      }
      for (const NewKey& one : owner.admitted.new_keys) {
        if (one.evicted != kEmptyKey) change.overwritten.push_back(one.row);
      }
      TF_RETURN_IF_ERROR(SaveRows(ctx, locked, table.first_shard,
                                  table.first_slot, spec, change.overwritten,
                                  &change.values));
    }
    for (const int32_t place : telling_) {
      std::vector<int64_t> keys;
      const LockedOpenTable& owner = (*tables)[specs_[place].owner];
      for (const NewKey& one : owner.admitted.new_keys) {
        if (one.evicted != kEmptyKey) keys.push_back(one.evicted);
      }
      TF_RETURN_IF_ERROR(outputs.SetVector(keys));
      for (const tensorflow::Tensor& value : (*changes)[place].values) {
        TF_RETURN_IF_ERROR(outputs.Set(value));
      }
    }
    return outputs.Finish();
  }

  absl::Status Find(tensorflow::OpKernelContext* ctx, EngineResource& resource,
                    const LockedShards& locked, KeyBatches* batches) const {
    const EngineConfig& config = resource.engine().config();
    // The first state variable of each owner.
    std::vector<int> first(specs_.size());
    int next = 0;
    for (size_t i = 0; i < specs_.size(); ++i) {
      if (!IsOwner(i)) continue;
      first[i] = next;
      next += NumStateVariables(
          specs_[i].policy,
          config.tables[specs_[i].table].partition.num_shards());
    }
    for (size_t i = 0; i < specs_.size(); ++i) {
      const OpenTableSpec& spec = specs_[i];
      if (!IsOwner(i)) TF_RETURN_IF_ERROR(CheckSharing(config, i));
      const TableSpec& table = config.tables[specs_[spec.owner].table];
      HeldBuckets buckets;
      TF_RETURN_IF_ERROR(buckets.Make(
          table.name, BucketOffsets(table), table.first_row / kKeysPerBucket,
          resource.vocabulary_buckets(specs_[spec.owner].table)));
      ShardedView<const int64_t> stored;
      TF_RETURN_IF_ERROR(locked.View(first[spec.owner], table.name + " (keys)",
                                     buckets.own, {kKeysPerBucket}, &stored));
      buckets.Place(&stored);
      const TableKeys keys = batches->KeysOf(spec.table);
      const RawArray<int64_t> rows(keys.keys.size());
      FindKeys(buckets.layout, stored, keys.keys, TfParallelFor(ctx), rows);
      for (int64_t& row : Span<int64_t>(rows)) {
        if (row != kNoRow) row -= buckets.first_row();
      }
      batches->TakeRows(spec.table, Span<int64_t>(rows),
                        UnknownRow(spec, buckets.layout), 0);
    }
    return absl::OkStatus();
  }

  static int64_t UnknownRow(const OpenTableSpec& spec,
                            const BucketLayout& layout) {
    return spec.has_unknown_row ? layout.num_rows() : kNoRow;
  }

  std::vector<OpenTableSpec> specs_;
  std::vector<float> slot_values_;
  std::vector<int32_t> telling_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_VOCABULARY_KEYS_OP_H_
