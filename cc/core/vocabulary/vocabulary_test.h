// A vocabulary for tests. Each shard is a heap allocation of its exact size, so
// that AddressSanitizer detects accesses beyond the shard.

#ifndef TF_LAYOUTMAP_CORE_VOCABULARY_VOCABULARY_TEST_H_
#define TF_LAYOUTMAP_CORE_VOCABULARY_VOCABULARY_TEST_H_

#include <cstdint>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/status.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/find_keys.h"
#include "cc/core/keys/policy.h"
#include "cc/core/keys/sketch.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/core/rows/row_partition.h"
#include "cc/core/simd/key_kernels.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/tables/table_test.h"
#include "cc/core/vocabulary/admit_keys.h"
#include "gtest/gtest.h"

namespace layoutmap {

class TestVocabulary {
 public:
  TestVocabulary(int64_t capacity, const VocabularyPolicy& policy,
                 int32_t num_shards = 1)
      : policy_(policy) {
    int64_t num_buckets = 0;
    ExpectFine(BucketLayout::NumBucketsFor(capacity, &num_buckets));
    ExpectFine(BucketLayout::Make(num_buckets, &layout_));
    std::vector<int64_t> offsets = {0};
    for (int32_t s = 0; s < num_shards; ++s) {
      offsets.push_back(num_buckets * (s + 1) / num_shards);
    }
    partition_ = MakePartition(Placement::kOffsets, offsets);
    Fill(kEmptyKey, &keys_, &state_.keys);
    Fill(0, &last_step_, &state_.last_step);
    Fill(0, &count_, &state_.count);
    if (policy.admission == Admission::kCount) {
      sketch_.resize(2 * SegmentSketch::NumCells(layout_) *
                     layout_.num_segments());
      seen_.resize(layout_.num_segments());
      state_.sketch = sketch_;
      state_.seen = seen_;
    }
  }
  // Objects cannot be copied, because the state contains views of members.
  TestVocabulary(const TestVocabulary&) = delete;
  TestVocabulary& operator=(const TestVocabulary&) = delete;

  Status Admit(const std::vector<int64_t>& keys, const VocabularyStep& step,
               const ParallelFor& parallel_for = SerialFor,
               CpuLevel level = CurrentCpuLevel()) {
    rows.assign(keys.size(), -7);
    return AdmitKeys(layout_, policy_, step, keys, parallel_for, state_, rows,
                     &admitted, KeyKernelsFor(level));
  }

  std::vector<int64_t> Find(const std::vector<int64_t>& keys) const {
    std::vector<int64_t> found(keys.size(), -7);
    ShardedView<const int64_t> stored;
    stored.partition = &partition_;
    stored.dim = kKeysPerBucket;
    stored.shards.assign(state_.keys.shards.begin(), state_.keys.shards.end());
    FindKeys(layout_, stored, keys, SerialFor, found);
    return found;
  }

  // Returns all values of the state. The result does not depend on the
  // sharding.
  std::vector<int64_t> Bits() const {
    std::vector<int64_t> bits;
    for (const auto& shard : keys_) {
      bits.insert(bits.end(), shard.begin(), shard.end());
    }
    for (const auto* shards : {&last_step_, &count_}) {
      for (const auto& shard : *shards) {
        bits.insert(bits.end(), shard.begin(), shard.end());
      }
    }
    bits.insert(bits.end(), sketch_.begin(), sketch_.end());
    bits.insert(bits.end(), seen_.begin(), seen_.end());
    return bits;
  }

  const BucketLayout& layout() const { return layout_; }
  const VocabularyPolicy& policy() const { return policy_; }
  const VocabularyState& state() const { return state_; }

  // The results of the last call of `Admit`.
  std::vector<int64_t> rows;
  AdmittedKeys admitted;

 private:
  static void ExpectFine(const Status& status) {
    EXPECT_TRUE(status.ok()) << status.message();
  }

  template <typename T>
  void Fill(T value, std::vector<std::vector<T>>* shards,
            ShardedView<T>* view) {
    view->partition = &partition_;
    view->dim = kKeysPerBucket;
    for (int32_t s = 0; s < partition_.num_shards(); ++s) {
      shards->emplace_back(partition_.shard_size(s) * kKeysPerBucket, value);
    }
    for (std::vector<T>& shard : *shards) view->shards.push_back(shard.data());
  }

  VocabularyPolicy policy_;
  BucketLayout layout_;
  RowPartition partition_;
  std::vector<std::vector<int64_t>> keys_;
  std::vector<std::vector<int32_t>> last_step_, count_;
  std::vector<uint8_t> sketch_;
  std::vector<int64_t> seen_;
  VocabularyState state_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_VOCABULARY_VOCABULARY_TEST_H_
