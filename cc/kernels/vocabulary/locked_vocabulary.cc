#include "cc/kernels/vocabulary/locked_vocabulary.h"

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/policy.h"
#include "cc/core/keys/sketch.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/served_keys/key_pieces.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/vocabulary/admit_keys.h"
#include "cc/kernels/changes/row_values.h"
#include "cc/kernels/kernel_util.h"
#include "cc/kernels/locked_shards.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace layoutmap {
namespace {

// Returns a view of an unsharded variable.
template <typename T>
absl::Status UnshardedView(tensorflow::OpKernelContext* ctx,
                           LockedShards* locked, int which,
                           const std::string& table, int64_t num_rows,
                           const tensorflow::TensorShape& row_shape,
                           Span<T>* span) {
  RowPartition whole;
  const std::vector<int64_t> offsets = {0, num_rows};
  TF_RETURN_IF_ERROR(
      ToTf(RowPartition::Make(Placement::kDiv, offsets, &whole)));
  ShardedView<T> view;
  TF_RETURN_IF_ERROR(
      locked->MutableView(ctx, which, table, whole, row_shape, &view));
  *span = {view.shards[0], num_rows * row_shape.num_elements()};
  return absl::OkStatus();
}

}  // namespace

int NumStateVariables(const VocabularyPolicy& policy, int num_shards) {
  return 3 * num_shards + (policy.admission == Admission::kCount ? 2 : 0) + 1;
}

absl::Status ReadPolicy(const std::string& admission, const std::string& evict,
                        const std::vector<int64_t>& numbers, size_t first,
                        VocabularyPolicy* policy) {
  if (numbers.size() < first + kNumPolicyNumbers) {
    return absl::InvalidArgumentError(absl::StrCat(
        "A policy must have ", kNumPolicyNumbers, " numbers. Received: ",
        static_cast<int64_t>(numbers.size()) - static_cast<int64_t>(first)));
  }
  for (size_t i : {0, 2, 3}) {
    if (numbers[first + i] < 0 ||
        numbers[first + i] > std::numeric_limits<int32_t>::max()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "The numbers of a policy must be in [0, 2^31 - 1]. Received: ",
          numbers[first + i]));
    }
  }
  TF_RETURN_IF_ERROR(ToTf(ParseAdmission(admission, &policy->admission)));
  TF_RETURN_IF_ERROR(ToTf(ParseEviction(evict, &policy->eviction)));
  policy->min_count = static_cast<int32_t>(numbers[first]);
  policy->admitted_of_2_32 = numbers[first + 1];
  policy->half_life_steps = static_cast<int32_t>(numbers[first + 2]);
  policy->ttl_steps = static_cast<int32_t>(numbers[first + 3]);
  policy->fails_when_full = numbers[first + 4] != 0;
  policy->seed = static_cast<uint64_t>(numbers[first + 5]);
  return ToTf(CheckPolicy(*policy));
}

absl::Status HeldBuckets::Make(const std::string& table,
                               const std::vector<int64_t>& offsets,
                               int64_t first, int64_t vocabulary_buckets) {
  TF_RETURN_IF_ERROR(
      ToTf(RowPartition::Make(Placement::kOffsets, offsets, &own)));
  is_shard = vocabulary_buckets > 0;
  if (!is_shard) return ToTf(BucketLayout::Make(own.num_rows(), &layout));
  first_bucket = first;
  KeyPiece piece;
  piece.table = table;
  piece.first_bucket = first;
  piece.num_buckets = own.num_rows();
  TF_RETURN_IF_ERROR(ToTf(BucketLayout::Make(vocabulary_buckets, &layout)));
  piece.layout = layout;
  TF_RETURN_IF_ERROR(ToTf(CheckKeyPiece(piece)));
  TF_RETURN_IF_ERROR(CheckNumVariables(
      absl::StrCat("The shard of vocabulary '", table, "' needs"), "keys", 1,
      own.num_shards()));
  return ToTf(PartOf(vocabulary_buckets, first, own.num_rows(), &all));
}

absl::Status LockedVocabulary::Make(tensorflow::OpKernelContext* ctx,
                                    LockedShards* locked, int first,
                                    const TableSpec& spec,
                                    int64_t vocabulary_buckets,
                                    const VocabularyPolicy& policy) {
  const std::string& table = spec.name;
  table_ = table;
  policy_ = policy;
  TF_RETURN_IF_ERROR(buckets_.Make(table, BucketOffsets(spec),
                                   spec.first_row / kKeysPerBucket,
                                   vocabulary_buckets));
  const RowPartition& own = buckets_.own;
  const int num_shards = own.num_shards();
  TF_RETURN_IF_ERROR(CheckNumVariables(
      absl::StrCat("Vocabulary '", table, "' needs"), "state",
      NumStateVariables(policy, num_shards),
      std::min(NumStateVariables(policy, num_shards), locked->size() - first)));
  const tensorflow::TensorShape bucket({kKeysPerBucket});
  TF_RETURN_IF_ERROR(locked->MutableView(ctx, first, table + " (keys)", own,
                                         bucket, &state_.keys));
  TF_RETURN_IF_ERROR(locked->MutableView(ctx, first + num_shards,
                                         table + " (last_step)", own, bucket,
                                         &state_.last_step));
  TF_RETURN_IF_ERROR(locked->MutableView(ctx, first + 2 * num_shards,
                                         table + " (count)", own, bucket,
                                         &state_.count));
  buckets_.Place(&state_.keys);
  buckets_.Place(&state_.last_step);
  buckets_.Place(&state_.count);
  if (buckets_.is_shard) {
    const int64_t per_segment = layout().buckets_per_segment();
    state_.first_segment = buckets_.first_bucket / per_segment;
    state_.num_segments = own.num_rows() / per_segment;
  }
  const int64_t num_segments = state_.NumSegments(layout());
  int next = first + 3 * num_shards;
  if (policy.admission == Admission::kCount) {
    TF_RETURN_IF_ERROR(
        UnshardedView(ctx, locked, next++, table + " (sketch)", num_segments,
                      {2, SegmentSketch::NumCells(layout())}, &state_.sketch));
    TF_RETURN_IF_ERROR(UnshardedView(ctx, locked, next++, table + " (seen)",
                                     num_segments, {}, &state_.seen));
  }
  return UnshardedView(ctx, locked, next, table + " (numbers)",
                       kNumVocabularyNumbers, {}, &numbers_);
}

absl::Status CheckKeyKind(const std::string& table, Span<const int64_t> numbers,
                          KeyKind kind) {
  const int64_t known = numbers[kKeyKind];
  if (kind == kNoKeysYet || known == kNoKeysYet || known == kind) {
    return absl::OkStatus();
  }
  const auto name = [](int64_t one) {
    return one == kStringKeys ? "strings" : "integers";
  };
  return absl::InvalidArgumentError(absl::StrCat(
      "The keys of table '", table, "' must be ", name(known),
      ", as those before. Received: ", name(kind), "; ",
      known == kStringKeys ? "tf.strings.as_string makes strings of them"
                           : "tf.strings.to_number makes numbers of them"));
}

absl::Status NextVocabularyStep(const std::string& table,
                                Span<const int64_t> numbers, int32_t* step) {
  const int64_t last = numbers[kVocabularyStep];
  if (last < 0 || last >= std::numeric_limits<int32_t>::max() - 1) {
    return absl::OutOfRangeError(
        absl::StrCat("A vocabulary supports at most 2^31 - 2 training steps. "
                     "Received: step ",
                     last, " of table '", table, "'"));
  }
  *step = static_cast<int32_t>(last + 1);
  return absl::OkStatus();
}

void AddCounts(const VocabularyCounts& counts, Span<int64_t> numbers) {
  const int64_t found[] = {counts.num_lookups,  counts.num_known,
                           counts.num_probes,   counts.num_admitted,
                           counts.num_rejected, counts.num_full,
                           counts.num_evicted,  counts.num_expired};
  for (int i = 0; i < kNumVocabularyNumbers - kFirstCount; ++i) {
    numbers[kFirstCount + i] += found[i];
  }
}

absl::Status LockedVocabulary::CheckKind(KeyKind kind) const {
  return CheckKeyKind(table_, numbers_, kind);
}

absl::Status LockedVocabulary::NextStep(int32_t* step) const {
  return NextVocabularyStep(table_, numbers_, step);
}

void LockedVocabulary::CountStep(int32_t step, KeyKind kind,
                                 const VocabularyCounts& counts) {
  numbers_[kVocabularyStep] = step;
  if (kind != kNoKeysYet && counts.num_lookups > 0) numbers_[kKeyKind] = kind;
  AddCounts(counts, numbers_);
}

void LockedVocabulary::CountEvicted(int64_t num_evicted, int64_t num_expired) {
  VocabularyCounts counts;
  counts.num_evicted = num_evicted;
  counts.num_expired = num_expired;
  CountStep(static_cast<int32_t>(numbers_[kVocabularyStep]), kNoKeysYet,
            counts);
}

ShardedView<const int64_t> LockedVocabulary::keys() const {
  ShardedView<const int64_t> view;
  view.partition = state_.keys.partition;
  view.dim = kKeysPerBucket;
  view.shards.assign(state_.keys.shards.begin(), state_.keys.shards.end());
  return view;
}

}  // namespace layoutmap
