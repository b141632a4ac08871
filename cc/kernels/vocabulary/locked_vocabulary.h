// The state of an open vocabulary, which is stored in variables. The locks of
// the variables are held.

#ifndef TF_LAYOUTMAP_KERNELS_VOCABULARY_LOCKED_VOCABULARY_H_
#define TF_LAYOUTMAP_KERNELS_VOCABULARY_LOCKED_VOCABULARY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/core/base/views.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/policy.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/steps/engine_config.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/core/vocabulary/admit_keys.h"
#include "cc/kernels/locked_shards.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace layoutmap {

// Indices into the int64 variable that contains the numbers of a vocabulary.
enum VocabularyNumber {
  // Number of training steps so far.
  kVocabularyStep,
  // The KeyKind of the keys.
  kKeyKind,
  // The first of the eight values of VocabularyCounts, in order.
  kFirstCount,
  kNumVocabularyNumbers = kFirstCount + 8,
};

// The kind of the keys in a vocabulary. A vocabulary must not contain both
// integer keys and hashed strings, because the hash of a string can equal any
// integer.
enum KeyKind { kNoKeysYet, kIntegerKeys, kStringKeys };

// Returns the number of state variables of a vocabulary with `num_shards`
// shards. The variables are the shards of the keys, of the last steps and of
// the counts, the sketch and its sums (only if keys are admitted by count), and
// the numbers.
int NumStateVariables(const VocabularyPolicy& policy, int num_shards);

// Reads a policy from six numbers that start at `numbers[first]`: min_count,
// the admission probability multiplied by 2^32, half_life_steps, ttl_steps,
// fails_when_full and seed.
absl::Status ReadPolicy(const std::string& admission, const std::string& evict,
                        const std::vector<int64_t>& numbers, size_t first,
                        VocabularyPolicy* policy);
constexpr size_t kNumPolicyNumbers = 6;

// Returns an error if `kind` differs from the kind of the earlier keys.
absl::Status CheckKeyKind(const std::string& table, Span<const int64_t> numbers,
                          KeyKind kind);
// Returns the number of the next training step.
absl::Status NextVocabularyStep(const std::string& table,
                                Span<const int64_t> numbers, int32_t* step);
// Adds `counts` to the counts in `numbers`.
void AddCounts(const VocabularyCounts& counts, Span<int64_t> numbers);

// The buckets of the variables of a vocabulary: all buckets, or the buckets of
// one shard. A shard consists of complete segments. The buckets of the other
// shards have no memory. Objects cannot be moved, because views point to their
// partitions.
struct HeldBuckets {
  HeldBuckets() = default;
  HeldBuckets(const HeldBuckets&) = delete;
  HeldBuckets& operator=(const HeldBuckets&) = delete;

  // `offsets` are the offsets of the variables. If `vocabulary_buckets` is not
  // 0, there is one variable, which is the shard of a vocabulary with this
  // number of buckets, and begins at `first_bucket`.
  absl::Status Make(const std::string& table,
                    const std::vector<int64_t>& offsets, int64_t first_bucket,
                    int64_t vocabulary_buckets);

  int64_t first_row() const { return first_bucket * kKeysPerBucket; }
  bool Has(int64_t key) const {
    const int64_t bucket = layout.BucketOf(key) - first_bucket;
    return bucket >= 0 && bucket < own.num_rows();
  }

  // Converts a view of the variables to a view of the full vocabulary.
  template <typename T>
  void Place(ShardedView<T>* view) const {
    if (!is_shard) return;
    view->partition = &all;
    view->shards = {nullptr, view->shards[0], nullptr};
  }

  bool is_shard = false;
  int64_t first_bucket = 0;
  // The layout of the full vocabulary.
  BucketLayout layout;
  // The partition of the buckets into variables.
  RowPartition own;
  // The partition of all buckets of the vocabulary.
  RowPartition all;
};

// The variables of a vocabulary, with their locks. Objects cannot be copied or
// moved, because the state points to the partitions.
class LockedVocabulary {
 public:
  LockedVocabulary() = default;
  LockedVocabulary(const LockedVocabulary&) = delete;
  LockedVocabulary& operator=(const LockedVocabulary&) = delete;

  // Reads the variables in `locked` that start at index `first`. The variables
  // must be locked exclusively. If the table is a shard,
  // `vocabulary_buckets` is the number of buckets in all shards of the
  // vocabulary. Otherwise, it is 0.
  absl::Status Make(tensorflow::OpKernelContext* ctx, LockedShards* locked,
                    int first, const TableSpec& table,
                    int64_t vocabulary_buckets, const VocabularyPolicy& policy);

  // Returns an error if `kind` differs from the kind of the earlier keys.
  absl::Status CheckKind(KeyKind kind) const;
  // Returns the number of the next training step.
  absl::Status NextStep(int32_t* step) const;

  // Records a training step after it was applied.
  void CountStep(int32_t step, KeyKind kind, const VocabularyCounts& counts);
  // Records keys that were evicted on request or because they had expired,
  // without a step.
  void CountEvicted(int64_t num_evicted, int64_t num_expired);

  const std::string& table() const { return table_; }
  const VocabularyPolicy& policy() const { return policy_; }
  // The layout of the unsharded vocabulary. `state` and functions such as
  // `AdmitKeys` use row numbers of the unsharded table.
  const BucketLayout& layout() const { return buckets_.layout; }
  const HeldBuckets& buckets() const { return buckets_; }
  const VocabularyState& state() const { return state_; }
  ShardedView<const int64_t> keys() const;
  int64_t step() const { return numbers_[kVocabularyStep]; }
  Span<int64_t> numbers() const { return numbers_; }

 private:
  std::string table_;
  VocabularyPolicy policy_;
  HeldBuckets buckets_;
  VocabularyState state_;
  Span<int64_t> numbers_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_VOCABULARY_LOCKED_VOCABULARY_H_
