#include "cc/core/vocabulary/sample_keys.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "cc/core/base/parallel_for_test.h"
#include "cc/core/vocabulary/vocabulary_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

struct Samples {
  explicit Samples(int64_t size) : keys(size), rows(size), weights(size) {}

  bool operator==(const Samples& other) const {
    return keys == other.keys && rows == other.rows &&
           weights == other.weights && total == other.total;
  }

  std::vector<int64_t> keys, rows, weights;
  int64_t total = -1;
};

// A vocabulary of 1,000 keys. The count of key k is k % 7 + 1.
void Admit(TestVocabulary* one) {
  std::vector<int64_t> keys;
  for (int64_t key = 0; key < 1000; ++key) {
    keys.insert(keys.end(), key % 7 + 1, key);
  }
  ASSERT_TRUE(one->Admit(keys, {1, 1, {}}).ok());
}

template <typename T>
ShardedView<const T> Const(const ShardedView<T>& view) {
  ShardedView<const T> found;
  found.partition = view.partition;
  found.dim = view.dim;
  found.shards.assign(view.shards.begin(), view.shards.end());
  return found;
}

CountedKeys Counted(const TestVocabulary& one) {
  CountedKeys counted;
  counted.keys = Const(one.state().keys);
  counted.last_step = Const(one.state().last_step);
  counted.count = Const(one.state().count);
  counted.step = 1;
  return counted;
}

Samples Sample(const TestVocabulary& one, SampleBy by, int64_t size,
               const ParallelFor& parallel_for = SerialFor) {
  Samples found(size);
  found.total = SampleKeys(Counted(one), by, {3, 4}, parallel_for, found.keys,
                           found.rows, found.weights);
  return found;
}

TEST(SampleKeysTest, ResultsDoNotDependOnThreadsOrShards) {
  TestVocabulary one(4000, VocabularyPolicy()),
      other(4000, VocabularyPolicy(), 3);
  Admit(&one);
  Admit(&other);
  for (const SampleBy by : {SampleBy::kUniform, SampleBy::kCount}) {
    const Samples found = Sample(one, by, 500);
    EXPECT_EQ(found.rows, one.Find(found.keys));
    EXPECT_TRUE(found == Sample(other, by, 500));
    EXPECT_TRUE(found == Sample(other, by, 500, UnevenFor(3)));
  }
}

TEST(SampleKeysTest, WeightsAreCounts) {
  TestVocabulary one(4000, VocabularyPolicy());
  Admit(&one);
  const Samples by_count = Sample(one, SampleBy::kCount, 500);
  for (int i = 0; i < 500; ++i) {
    EXPECT_EQ(by_count.weights[i], by_count.keys[i] % 7 + 1);
  }
  EXPECT_EQ(Sample(one, SampleBy::kUniform, 0).total, 1000);
  std::vector<int64_t> keys(1000), counts(1000);
  std::iota(keys.begin(), keys.end(), 0);
  CountKeys(one.layout(), Counted(one), keys, UnevenFor(3), counts);
  EXPECT_EQ(by_count.total, std::accumulate(counts.begin(), counts.end(), 0));
}

TEST(SampleKeysTest, KeysWithoutUsesAreSampled) {
  TestVocabulary one(4000, VocabularyPolicy());
  Admit(&one);
  const ShardedView<int32_t>& count = one.state().count;
  for (size_t s = 0; s < count.shards.size(); ++s) {
    std::fill_n(count.shards[s],
                count.partition->shard_size(s) * kKeysPerBucket, 0);
  }
  VocabularyPolicy decaying;
  decaying.half_life_steps = 1;
  for (const VocabularyPolicy& policy : {VocabularyPolicy(), decaying}) {
    CountedKeys counted = Counted(one);
    counted.policy = policy;
    Samples found(500);
    found.total = SampleKeys(counted, SampleBy::kCount, {3, 4}, SerialFor,
                             found.keys, found.rows, found.weights);
    EXPECT_EQ(found.total, 1000);
    EXPECT_EQ(found.weights, std::vector<int64_t>(500, 1));
    EXPECT_EQ(found.rows, one.Find(found.keys));
  }
}

TEST(SampleKeysTest, AnEmptyVocabularyHasNoSamples) {
  TestVocabulary one(64, VocabularyPolicy());
  Samples expected(3);
  expected.total = 0;
  EXPECT_TRUE(expected == Sample(one, SampleBy::kCount, 3));
}

}  // namespace
}  // namespace layoutmap
