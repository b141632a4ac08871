// Compares a vocabulary that is partitioned over servers with a single-process
// vocabulary.

#include "cc/core/served_keys/key_pieces.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/parallel_for_test.h"
#include "cc/core/base/status.h"
#include "cc/core/keys/bucket_layout.h"
#include "cc/core/keys/first_values.h"
#include "cc/core/keys/policy.h"
#include "cc/core/served_keys/key_pieces_test.h"
#include "cc/core/vocabulary/vocabulary_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

std::vector<int64_t> RandomKeys(int64_t below, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int64_t> keys(150);
  for (int64_t& key : keys) key = static_cast<int64_t>(random() % below) - 9;
  return keys;
}

VocabularyPolicy MakePolicy(Admission admission, Eviction eviction) {
  VocabularyPolicy policy;
  policy.admission = admission;
  policy.eviction = eviction;
  policy.min_count = 2;
  policy.half_life_steps = 3;
  if (admission == Admission::kProbability) {
    policy.admitted_of_2_32 = int64_t{1} << 31;
  }
  return policy;
}

class KeyPiecesTest
    : public testing::TestWithParam<std::tuple<Admission, Eviction>> {};

TEST_P(KeyPiecesTest, AllPiecesTogetherEqualASingleProcessVocabulary) {
  const VocabularyPolicy policy =
      MakePolicy(std::get<0>(GetParam()), std::get<1>(GetParam()));
  TestVocabulary single_process(kCapacity, policy);
  Servers servers(policy);
  int64_t num_admitted = 0;
  for (int32_t number = 1; number <= 20; ++number) {
    const std::vector<int64_t> keys = RandomKeys(700, number);
    VocabularyStep step;
    step.number = step.oldest_in_flight = number;
    ASSERT_TRUE(single_process.Admit(keys, step).ok());
    servers.Request(keys);
    std::vector<KeyPieceStep> steps = servers.steps(number - 1);
    ASSERT_TRUE(AdmitToPieces(servers.pieces(), UnevenFor(3), &steps).ok());
    std::map<int64_t, int64_t> rows = servers.RowsOf(steps);
    for (size_t i = 0; i < keys.size(); ++i) {
      EXPECT_EQ(rows[keys[i]], single_process.rows[i]) << number;
    }
    VocabularyCounts total;
    for (const KeyPieceStep& one : steps) {
      total.num_lookups += one.counts.num_lookups;
      total.num_admitted += one.counts.num_admitted;
      total.num_evicted += one.counts.num_evicted;
    }
    EXPECT_EQ(total.num_lookups, single_process.admitted.counts.num_lookups);
    EXPECT_EQ(total.num_admitted, single_process.admitted.counts.num_admitted);
    EXPECT_EQ(total.num_evicted, single_process.admitted.counts.num_evicted);
    num_admitted += total.num_admitted;
    ASSERT_EQ(servers.Bits(policy.admission == Admission::kCount),
              single_process.Bits())
        << number;
  }
  EXPECT_GT(num_admitted, 0);
}

INSTANTIATE_TEST_SUITE_P(
    Policies, KeyPiecesTest,
    testing::Combine(testing::Values(Admission::kAll, Admission::kCount,
                                     Admission::kProbability),
                     testing::Values(Eviction::kNone, Eviction::kLru,
                                     Eviction::kLfu)));

TEST(KeyPiecesTest, NewKeysGetTheirInitialValues) {
  Servers servers(MakePolicy(Admission::kAll, Eviction::kLru));
  servers.Request(RandomKeys(300, 1));
  std::vector<KeyPieceStep> steps = servers.steps();
  ASSERT_TRUE(AdmitToPieces(servers.pieces(), SerialFor, &steps).ok());
  for (size_t s = 0; s < steps.size(); ++s) {
    const Server& server = *servers.servers[s];
    for (size_t i = 0; i < steps[s].rows.size(); ++i) {
      const uint32_t place = steps[s].rows[i];
      if (place == kNoPlace) continue;
      std::vector<float> expected(kDim);
      FillFirstValues(server.step.first_rows.values, server.requested.keys[i],
                      expected);
      for (int64_t c = 0; c < kDim; ++c) {
        EXPECT_EQ(server.rows[place * kDim + c], expected[c]);
      }
    }
  }
}

TEST(KeyPiecesTest, FindChangesNothing) {
  Servers servers(MakePolicy(Admission::kAll, Eviction::kLru));
  const std::vector<int64_t> keys = RandomKeys(300, 1);
  servers.Request(keys);
  std::vector<KeyPieceStep> steps = servers.steps();
  ASSERT_TRUE(AdmitToPieces(servers.pieces(), SerialFor, &steps).ok());
  std::map<int64_t, int64_t> rows = servers.RowsOf(steps);
  const std::vector<int64_t> bits = servers.Bits(false);
  std::vector<int64_t> more = keys;
  for (int64_t key = 1000; key < 1020; ++key) more.push_back(key);
  servers.Request(more);
  steps = servers.steps(1);
  FindInPieces(servers.pieces(), UnevenFor(2), &steps);
  std::map<int64_t, int64_t> found = servers.RowsOf(steps);
  for (const int64_t key : keys) EXPECT_EQ(found[key], rows[key]);
  for (int64_t key = 1000; key < 1020; ++key) EXPECT_EQ(found[key], kNoRow);
  EXPECT_EQ(servers.Bits(false), bits);
}

TEST(KeyPiecesTest, AFullPieceLeavesAllPiecesUnchanged) {
  VocabularyPolicy policy = MakePolicy(Admission::kAll, Eviction::kNone);
  policy.fails_when_full = true;
  Servers servers(policy);
  servers.Request(RandomKeys(40, 1));
  std::vector<KeyPieceStep> steps = servers.steps();
  ASSERT_TRUE(AdmitToPieces(servers.pieces(), SerialFor, &steps).ok());
  const std::vector<int64_t> bits = servers.Bits(false);
  // The request contains more keys for the last server than it has rows, and
  // one new key for the first server.
  std::vector<int64_t> keys;
  for (int64_t key = 1000; keys.size() < 200; ++key) {
    if (servers.servers[2]->Has(key)) keys.push_back(key);
  }
  int64_t first = 5000;
  while (!servers.servers[0]->Has(first)) ++first;
  keys.push_back(first);
  servers.Request(keys);
  steps = servers.steps(1);
  const Status status = AdmitToPieces(servers.pieces(), UnevenFor(2), &steps);
  EXPECT_NE(status.message().find("has no free row"), std::string::npos)
      << status.message();
  EXPECT_NE(status.message().find("(table 'words')"), std::string::npos);
  EXPECT_EQ(servers.Bits(false), bits);
}

TEST(KeyPiecesTest, ARepeatedClosurePinsItsRowsAndCountsNoUse) {
  Servers servers(MakePolicy(Admission::kAll, Eviction::kLfu));
  servers.Request({1, 1, 1, 1, 1, 1, 1, 1});
  std::vector<KeyPieceStep> steps = servers.steps();
  ASSERT_TRUE(AdmitToPieces(servers.pieces(), SerialFor, &steps).ok());
  steps = servers.steps(7);
  FindInPieces(servers.pieces(), SerialFor, &steps);
  const int64_t row = servers.RowsOf(steps)[1];
  // The closure ran two steps ago, in step 6.
  PinInPieces(servers.pieces(), 2, &steps);
  for (size_t s = 0; s < steps.size(); ++s) {
    const Server& server = *servers.servers[s];
    if (!server.Has(1)) continue;
    const int64_t lane = row - server.piece.first_row();
    EXPECT_EQ(server.last_step[lane], 6);
    // The count of 8 was halved once in five steps.
    EXPECT_EQ(server.count[lane], 4);
  }
}

TEST(KeyPiecesTest, RowsAreSentOnceAndTheUnknownRowAlways) {
  KeyPiece piece;
  piece.num_buckets = 4;
  KeyPieceStep step;
  step.rows = {9, kNoPlace, 3, 9};
  EXPECT_EQ(RowsToSend(piece, step), (std::vector<uint32_t>{3, 9}));
  piece.has_unknown_row = true;
  EXPECT_EQ(RowsToSend(piece, step), (std::vector<uint32_t>{3, 9, 32}));
}

TEST(KeyPiecesTest, KeysAndSegmentsOfOtherServersAreRejected) {
  const Servers servers(MakePolicy(Admission::kAll, Eviction::kLru));
  const KeyPiece& piece = servers.servers[1]->piece;
  int64_t foreign = 0;
  while (servers.servers[1]->Has(foreign)) ++foreign;
  for (const int64_t key : {foreign, kEmptyKey}) {
    const Status status = CheckKeysOf(piece, std::vector<int64_t>{key});
    EXPECT_NE(status.message().find(
                  "keys of the shards on this server. Received: key " +
                  std::to_string(key)),
              std::string::npos)
        << status.message();
  }
  for (const auto& [first, count] :
       {std::pair<int64_t, int64_t>{1, 4}, {0, 3}, {0, 0}, {-4, 4}, {28, 8}}) {
    KeyPiece bad = piece;
    bad.first_bucket = first;
    bad.num_buckets = count;
    EXPECT_FALSE(CheckKeyPiece(bad).ok()) << first << " " << count;
  }
}

}  // namespace
}  // namespace layoutmap
