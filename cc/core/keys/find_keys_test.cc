#include "cc/core/keys/find_keys.h"

#include <cstdint>
#include <random>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/parallel_for_test.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/policy.h"
#include "cc/core/keys/vocabulary_state.h"
#include "cc/core/tables/sharded_view.h"
#include "cc/core/vocabulary/vocabulary_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

// Finds the row of each key by itself.
std::vector<int64_t> ExpectedRows(const TestVocabulary& vocabulary,
                                  const std::vector<int64_t>& keys) {
  std::vector<int64_t> rows;
  WithBuckets(vocabulary.state(), [&](const auto& buckets) {
    const auto keys_of = [&](int64_t b) { return buckets.keys(b); };
    const BucketLayout& layout = vocabulary.layout();
    int64_t num_probes = 0;
    for (const int64_t key : keys) {
      rows.push_back(key == kEmptyKey
                         ? kNoRow
                         : FindRow(layout, keys_of, layout.BucketOf(key), key,
                                   &num_probes));
    }
  });
  return rows;
}

// Tests the search for `num_keys` keys, of which a fraction is in the
// vocabulary, and some are kEmptyKey.
void TestFindKeys(int64_t num_keys, double known, int32_t num_shards) {
  SCOPED_TRACE(testing::Message() << num_keys << " keys, " << known << ", "
                                  << num_shards << " shards");
  constexpr int64_t kCapacity = 20000;
  TestVocabulary vocabulary(kCapacity, VocabularyPolicy(), num_shards);
  std::vector<int64_t> added;
  for (int64_t i = 0; i < kCapacity * 9 / 10; ++i) added.push_back(i * 977);
  ASSERT_TRUE(vocabulary.Admit(added, VocabularyStep()).ok());
  std::mt19937_64 random(num_keys);
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < num_keys; ++i) {
    const auto key = static_cast<int64_t>(random() % added.size()) * 977;
    const bool is_known = random() % 1000 < 1000 * known;
    keys.push_back(is_known ? key : -1 - key);
    if (random() % 50 == 0) keys.back() = kEmptyKey;
  }
  ShardedView<const int64_t> stored;
  stored.partition = vocabulary.state().keys.partition;
  stored.dim = kKeysPerBucket;
  stored.shards.assign(vocabulary.state().keys.shards.begin(),
                       vocabulary.state().keys.shards.end());
  const std::vector<int64_t> expected = ExpectedRows(vocabulary, keys);
  for (const ParallelFor& parallel_for :
       {ParallelFor(SerialFor), UnevenFor(1), UnevenFor(3)}) {
    std::vector<int64_t> rows(keys.size(), -7);
    FindKeys(vocabulary.layout(), stored, keys, parallel_for,
             Span<int64_t>(rows));
    EXPECT_EQ(rows, expected);
  }
}

TEST(FindKeysTest, EachKeyIsFoundInItsBuckets) {
  // The vocabulary has 2,500 buckets or a few more. Depending on the number of
  // keys and on the known keys, FindKeys uses different orders of the search.
  for (const int64_t num_keys : {0, 1, 100, 255, 256, 1000, 2000, 5000}) {
    for (const double known : {0.0, 0.5, 1.0}) {
      TestFindKeys(num_keys, known, 1);
    }
  }
}

TEST(FindKeysTest, SegmentsCanBeInSeveralShards) {
  // With 64 shards, each shard has one segment. With 3 shards, the buckets of
  // two segments are in several shards.
  for (const int32_t num_shards : {2, 3, 64}) {
    for (const double known : {0.2, 1.0}) {
      TestFindKeys(5000, known, num_shards);
    }
  }
}

TEST(FindKeysTest, AVocabularyCanHaveOneBucket) {
  TestVocabulary vocabulary(8, VocabularyPolicy());
  ASSERT_TRUE(vocabulary.Admit({5, 6, 7}, VocabularyStep()).ok());
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < 600; ++i) keys.push_back(i % 9);
  EXPECT_EQ(vocabulary.Find(keys), ExpectedRows(vocabulary, keys));
}

}  // namespace
}  // namespace layoutmap
