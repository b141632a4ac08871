#include "cc/core/vocabulary/admit_keys.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "cc/core/base/parallel_for_test.h"
#include "cc/core/base/status.h"
#include "cc/core/ids/row_groups.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/policy.h"
#include "cc/core/simd/row_kernels.h"
#include "cc/core/vocabulary/evict_keys.h"
#include "cc/core/vocabulary/move_keys.h"
#include "cc/core/vocabulary/vocabulary_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

std::vector<int64_t> FrequentKeys(int64_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int64_t> keys(size);
  for (int64_t& key : keys) {
    // A few keys are frequent. Most keys are rare.
    const uint32_t bound = 1u << (random() % 15);
    key = static_cast<int64_t>(random() % bound) * 104729 - 5;
  }
  return keys;
}

VocabularyPolicy MakePolicy(Admission admission, Eviction eviction) {
  VocabularyPolicy policy;
  policy.admission = admission;
  policy.min_count = 2;
  policy.admitted_of_2_32 = int64_t{1} << 31;
  policy.eviction = eviction;
  policy.half_life_steps = 2;
  policy.ttl_steps = 5;
  return policy;
}

TEST(BucketLayoutTest, SegmentsPartitionTheBuckets) {
  for (int64_t capacity :
       {1, 8, 9, 63, 64, 65, 100, 500, 2000, 2048, 2049, 1000000, 2000000}) {
    int64_t num_buckets = 0;
    ASSERT_TRUE(BucketLayout::NumBucketsFor(capacity, &num_buckets).ok());
    BucketLayout layout;
    ASSERT_TRUE(BucketLayout::Make(num_buckets, &layout).ok());
    EXPECT_GE(layout.num_rows(), capacity);
    EXPECT_EQ(layout.num_segments() * layout.buckets_per_segment(),
              num_buckets);
    for (int64_t key = -500; key < 500; ++key) {
      const int64_t first = layout.BucketOf(key * 1000003);
      ASSERT_GE(first, 0);
      ASSERT_LT(first, num_buckets);
      EXPECT_EQ(layout.SegmentOf(layout.Next(first)), layout.SegmentOf(first));
    }
  }
  int64_t unused;
  EXPECT_FALSE(BucketLayout::NumBucketsFor(0, &unused).ok());
  BucketLayout layout;
  EXPECT_FALSE(BucketLayout::Make(0, &layout).ok());
  EXPECT_FALSE(BucketLayout::Make(257, &layout).ok());
}

// Expects that the groups of the last step contain the rows of all keys.
void ExpectGroupsMatchRows(const TestVocabulary& one) {
  const RowGroups& groups = *one.admitted.groups;
  std::vector<int64_t> seen(one.rows.size(), kNoRow);
  int64_t last_row = -1;
  for (const RowGroups::Part& part : groups.parts) {
    for (int64_t u = 0; u < part.num_rows; ++u) {
      const int64_t row = groups.rows[part.first + u];
      EXPECT_GT(row, last_row);
      last_row = row;
      const int64_t end = u + 1 < part.num_rows
                              ? groups.starts[part.first + u + 1]
                              : part.num_positions;
      int64_t last_position = -1;
      for (int64_t k = groups.starts[part.first + u]; k < end; ++k) {
        const int64_t position = groups.positions[part.first + k];
        EXPECT_GT(position, last_position);
        last_position = position;
        seen[position] = row;
      }
      EXPECT_NE(last_position, -1);
    }
  }
  EXPECT_EQ(seen, one.rows);
}

struct AdmitCase {
  int32_t num_shards;
  int num_threads;
  CpuLevel level;
  SearchOrder search;
};

std::vector<AdmitCase> AdmitCases() {
  std::vector<AdmitCase> cases;
  for (int32_t num_shards : {1, 3, 7}) {
    for (int num_threads : {1, 2, 8}) {
      // Each number of threads has a different instruction set.
      const CpuLevel level = num_threads == 1   ? CpuLevel::kBaseline
                             : num_threads == 2 ? CpuLevel::kAvx2
                                                : CpuLevel::kAvx512;
      if (!CpuHas(level)) continue;
      cases.push_back(
          {num_shards, num_threads, level, SearchOrder::kBySegment});
      // With more shards, some segments are not contiguous, so that a search by
      // batch is not possible.
      if (num_shards == 1) {
        cases.push_back(
            {num_shards, num_threads, level, SearchOrder::kByBatch});
      }
    }
  }
  return cases;
}

// Returns all results of seven steps. The last step only has known keys.
std::vector<std::vector<int64_t>> RunSteps(const VocabularyPolicy& policy,
                                           const AdmitCase& with) {
  TestVocabulary one(3000, policy, with.num_shards);
  std::vector<std::vector<int64_t>> found;
  for (int32_t step = 1; step <= 7; ++step) {
    VocabularyStep now = {step, std::max(1, step - 2), {}};
    now.search = with.search;
    // There are more keys than `SegmentPlaces` has in one part.
    std::vector<int64_t> keys = FrequentKeys(9000, step);
    if (step == 7) {
      std::vector<int64_t> known;
      const std::vector<int64_t> rows = one.Find(keys);
      for (size_t i = 0; i < keys.size(); ++i) {
        if (rows[i] != kNoRow) known.push_back(keys[i]);
      }
      keys = known;
      EXPECT_GT(keys.size(), 4500u);
    }
    const Status status =
        one.Admit(keys, now, UnevenFor(with.num_threads), with.level);
    EXPECT_TRUE(status.ok()) << status.message();
    ExpectGroupsMatchRows(one);
    found.push_back(one.rows);
    const VocabularyCounts& counts = one.admitted.counts;
    found.push_back({counts.num_lookups, counts.num_known, counts.num_probes,
                     counts.num_admitted, counts.num_rejected, counts.num_full,
                     counts.num_evicted, counts.num_expired});
    std::vector<int64_t> new_keys;
    for (const NewKey& key : one.admitted.new_keys) {
      new_keys.insert(new_keys.end(), {key.row, key.key, key.evicted});
    }
    found.push_back(new_keys);
  }
  found.push_back(one.Bits());
  return found;
}

TEST(AdmitKeysTest, ResultsAreBitwiseIdenticalForAllThreadsShardsAndLevels) {
  for (Admission admission :
       {Admission::kAll, Admission::kCount, Admission::kProbability}) {
    for (Eviction eviction :
         {Eviction::kNone, Eviction::kLru, Eviction::kLfu}) {
      VocabularyPolicy policy = MakePolicy(admission, eviction);
      if (eviction == Eviction::kLru) policy.half_life_steps = 0;
      std::vector<std::vector<int64_t>> expected;
      for (const AdmitCase& with : AdmitCases()) {
        const std::vector<std::vector<int64_t>> found = RunSteps(policy, with);
        if (expected.empty()) expected = found;
        EXPECT_EQ(found, expected);
      }
    }
  }
}

TEST(AdmitKeysTest, KeysAndRowsAreOneToOne) {
  TestVocabulary one(512, MakePolicy(Admission::kAll, Eviction::kLru), 3);
  for (int32_t step = 1; step <= 40; ++step) {
    const std::vector<int64_t> keys = FrequentKeys(300, step);
    const std::vector<int64_t> pinned = {1, 2, 3};
    const VocabularyStep now = {step, std::max(1, step - 1), pinned};
    ASSERT_TRUE(one.Admit(keys, now, UnevenFor(4)).ok());
    EXPECT_EQ(one.rows, one.Find(keys));
    std::vector<int64_t> all;
    for (const KeptKey& kept : KeysOfState(one.layout(), one.state())) {
      all.push_back(kept.key);
    }
    std::sort(all.begin(), all.end());
    EXPECT_EQ(std::adjacent_find(all.begin(), all.end()), all.end());
  }
}

TEST(AdmitKeysTest, AFailedStepChangesNothing) {
  VocabularyPolicy policy = MakePolicy(Admission::kCount, Eviction::kNone);
  policy.ttl_steps = 0;
  policy.fails_when_full = true;
  TestVocabulary one(600, policy, 3);
  Status status;
  for (int32_t step = 1; status.ok() && step < 100; ++step) {
    const std::vector<int64_t> before = one.Bits();
    status = one.Admit(FrequentKeys(500, step), {step, step, {}}, UnevenFor(4));
    if (!status.ok()) {
      EXPECT_EQ(one.Bits(), before);
      EXPECT_EQ(status.code(), Code::kFailedPrecondition);
    }
  }
  EXPECT_FALSE(status.ok());
}

TEST(AdmitKeysTest, InvalidArgumentsAreRejected) {
  TestVocabulary one(8, VocabularyPolicy());
  EXPECT_FALSE(one.Admit({kEmptyKey}, {1, 1, {}}).ok());
  EXPECT_FALSE(one.Admit({1}, {0, 0, {}}).ok());
  EXPECT_FALSE(one.Admit({1}, {3, 4, {}}).ok());
  VocabularyPolicy counts;
  counts.admission = Admission::kCount;
  AdmittedKeys admitted;
  const std::vector<int64_t> keys = {1};
  std::vector<int64_t> rows = {0};
  EXPECT_FALSE(AdmitKeys(one.layout(), counts, {1, 1, {}}, keys, SerialFor,
                         one.state(), rows, &admitted)
                   .ok());
  EXPECT_EQ(one.Find({1})[0], kNoRow);
}

TEST(EvictKeysTest, KeysInUseStayAndOthersAreEvictedOnce) {
  TestVocabulary one(64, VocabularyPolicy(), 2);
  ASSERT_TRUE(one.Admit({1, 2, 3}, {1, 1, {}}).ok());
  ASSERT_TRUE(one.Admit({3}, {2, 2, {}}).ok());
  std::vector<KeyOfRow> evicted;
  const std::vector<int64_t> all = {2, 3};
  const std::vector<int64_t> before = one.Bits();
  const Status status =
      EvictKeys(one.layout(), {2, 2, {}}, all, one.state(), &evicted);
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_EQ(one.Bits(), before);
  const std::vector<int64_t> some = {2, 17, 1, 2};
  ASSERT_TRUE(
      EvictKeys(one.layout(), {2, 2, {}}, some, one.state(), &evicted).ok());
  ASSERT_EQ(evicted.size(), 2u);
  EXPECT_EQ(evicted[0].key, 2);
  EXPECT_EQ(evicted[1].key, 1);
  EXPECT_EQ(one.Find({1, 2})[0], kNoRow);
  EXPECT_NE(one.Find({3})[0], kNoRow);
}

TEST(MoveKeysTest, KeysWithTheHighestScoresGetARow) {
  TestVocabulary old(512, VocabularyPolicy());
  for (int32_t step = 1; step <= 200; ++step) {
    ASSERT_TRUE(old.Admit({step * 1000}, {step, step, {}}).ok());
  }
  TestVocabulary small(16, VocabularyPolicy());
  std::vector<RowMove> moves;
  ASSERT_TRUE(PutKeys(small.layout(), small.policy(), 200,
                      KeysOfState(old.layout(), old.state()), small.state(),
                      &moves)
                  .ok());
  EXPECT_EQ(moves.size(), 16u);
  for (int32_t step = 185; step <= 200; ++step) {
    EXPECT_NE(small.Find({step * 1000})[0], kNoRow) << step;
  }
  EXPECT_FALSE(PutKeys(small.layout(), small.policy(), 1,
                       {{0, 4, 1, 1}, {1, 4, 1, 1}}, small.state(), &moves)
                   .ok());
}

}  // namespace
}  // namespace layoutmap
