// The state of an open vocabulary in variables, held under their locks.

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
#include "cc/core/tables/sharded_view.h"
#include "cc/core/vocabulary/admit_keys.h"
#include "cc/kernels/locked_shards.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace layoutmap {

// What a variable of int64 numbers holds of a vocabulary, besides its keys.
enum VocabularyNumber {
  kVocabularyStep,  // how many training steps there were
  kKeyKind,         // what its keys are made of: KeyKind
  kFirstCount,      // then the eight counts of VocabularyCounts, in order
  kNumVocabularyNumbers = kFirstCount + 8,
};

// Integers and hashed strings never mix in one vocabulary: a string's hash may
// be any integer.
enum KeyKind { kNoKeysYet, kIntegerKeys, kStringKeys };

// How many variables the state has in so many shards: the shards of keys, of
// last steps and of counts, the sketch and its sums where keys are counted, and
// the numbers.
int NumStateVariables(const VocabularyPolicy& policy, int num_shards);

// Reads a policy from the numbers [min_count, admitted of 2^32,
// half_life_steps, ttl_steps, fails_when_full, seed] at `numbers[first]`.
absl::Status ReadPolicy(const std::string& admission, const std::string& evict,
                        const std::vector<int64_t>& numbers, size_t first,
                        VocabularyPolicy* policy);
constexpr size_t kNumPolicyNumbers = 6;

// Refuses strings where the keys were integers, and the other way round.
absl::Status CheckKeyKind(const std::string& table, Span<const int64_t> numbers,
                          KeyKind kind);
// The number of the next training step.
absl::Status NextVocabularyStep(const std::string& table,
                                Span<const int64_t> numbers, int32_t* step);
// Adds what a step, or something else, has counted.
void AddCounts(const VocabularyCounts& counts, Span<int64_t> numbers);

// Not copied or moved: the state has views of the partitions.
class LockedVocabulary {
 public:
  LockedVocabulary() = default;
  LockedVocabulary(const LockedVocabulary&) = delete;
  LockedVocabulary& operator=(const LockedVocabulary&) = delete;

  // Takes the variables of `locked`, which are locked exclusively, from number
  // `first` on. `bucket_offsets` are those of the shards.
  absl::Status Make(tensorflow::OpKernelContext* ctx, LockedShards* locked,
                    int first, const std::string& table,
                    const std::vector<int64_t>& bucket_offsets,
                    const VocabularyPolicy& policy);

  // Refuses strings where the keys were integers, and the other way round.
  absl::Status CheckKind(KeyKind kind) const;
  // The number of the next training step.
  absl::Status NextStep(int32_t* step) const;

  // Counts a step that has been carried out.
  void CountStep(int32_t step, KeyKind kind, const VocabularyCounts& counts);
  // Keys that left otherwise than in a step.
  void CountEvicted(int64_t num_evicted, int64_t num_expired);

  const std::string& table() const { return table_; }
  const VocabularyPolicy& policy() const { return policy_; }
  const BucketLayout& layout() const { return layout_; }
  const VocabularyState& state() const { return state_; }
  ShardedView<const int64_t> keys() const;
  int64_t step() const { return numbers_[kVocabularyStep]; }
  Span<int64_t> numbers() const { return numbers_; }

 private:
  std::string table_;
  VocabularyPolicy policy_;
  BucketLayout layout_;
  RowPartition buckets_;
  VocabularyState state_;
  Span<int64_t> numbers_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_KERNELS_VOCABULARY_LOCKED_VOCABULARY_H_
