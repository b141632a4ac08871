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
#include "cc/core/keys/merged_keys.h"
#include "cc/core/keys/policy.h"
#include "cc/core/served_keys/key_pieces_test.h"
#include "cc/core/vocabulary/admit_keys.h"
#include "cc/core/vocabulary/vocabulary_test.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

std::vector<int64_t> RandomKeys(int64_t below, uint32_t seed,
                                size_t num_keys = 150) {
  std::mt19937 random(seed);
  std::vector<int64_t> keys(num_keys);
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

// The tables `wide` and `deep`, which share the vocabulary of `deep`. The
// pieces of `wide` precede the pieces that own the vocabulary.
class SharedServers {
 public:
  explicit SharedServers(const VocabularyPolicy& policy)
      : wide(policy), deep(policy) {
    for (size_t s = 0; s < wide.servers.size(); ++s) {
      Server& server = *wide.servers[s];
      server.piece.table = "wide";
      server.piece.owner = static_cast<int32_t>(wide.servers.size() + s);
      server.step.state = deep.servers[s]->step.state;
      server.step.stored = deep.servers[s]->step.stored;
      server.step.first_rows.values.seed = 5;
    }
  }

  void Request(const std::vector<int64_t>& wide_keys,
               const std::vector<int64_t>& deep_keys) {
    wide.Request(wide_keys);
    deep.Request(deep_keys);
  }

  std::vector<KeyPiece> pieces() const {
    return Joined(wide.pieces(), deep.pieces());
  }
  std::vector<KeyPieceStep> steps(int32_t last_step) const {
    return Joined(wide.steps(last_step), deep.steps(last_step));
  }
  static std::vector<KeyPieceStep> OfWide(
      const std::vector<KeyPieceStep>& steps) {
    return {steps.begin(),
            steps.begin() + static_cast<int64_t>(steps.size() / 2)};
  }
  static std::vector<KeyPieceStep> OfDeep(
      const std::vector<KeyPieceStep>& steps) {
    return {steps.begin() + static_cast<int64_t>(steps.size() / 2),
            steps.end()};
  }

  Servers wide, deep;

 private:
  template <typename T>
  static std::vector<T> Joined(std::vector<T> first,
                               const std::vector<T>& second) {
    first.insert(first.end(), second.begin(), second.end());
    return first;
  }
};

TEST_P(KeyPiecesTest, PiecesThatShareAVocabularyEqualASingleVocabulary) {
  const VocabularyPolicy policy =
      MakePolicy(std::get<0>(GetParam()), std::get<1>(GetParam()));
  TestVocabulary single_process(kCapacity, policy);
  SharedServers servers(policy);
  int64_t num_evicted = 0;
  for (int32_t number = 1; number <= 20; ++number) {
    const std::vector<int64_t> deep = RandomKeys(700, number);
    const std::vector<int64_t> wide =
        number % 5 == 0 ? deep
                        : RandomKeys(700, 99 + number, 40 * (number % 3));
    const MergedKeys merged = MergeKeys({deep, wide});
    VocabularyStep step;
    step.number = step.oldest_in_flight = number;
    ASSERT_TRUE(single_process.Admit(merged.keys, step).ok());
    servers.Request(wide, deep);
    std::vector<KeyPieceStep> steps = servers.steps(number - 1);
    ASSERT_TRUE(AdmitToPieces(servers.pieces(), UnevenFor(3), &steps).ok());
    std::map<int64_t, int64_t> expected;
    for (size_t i = 0; i < merged.keys.size(); ++i) {
      expected[merged.keys[i]] = single_process.rows[i];
    }
    for (const auto& [key, row] :
         servers.deep.RowsOf(SharedServers::OfDeep(steps))) {
      EXPECT_EQ(row, expected[key]) << number;
    }
    for (const auto& [key, row] :
         servers.wide.RowsOf(SharedServers::OfWide(steps))) {
      EXPECT_EQ(row, expected[key]) << number;
    }
    VocabularyCounts total;
    std::map<int64_t, int64_t> new_rows;
    for (size_t p = 0; p < steps.size(); ++p) {
      const KeyPiece piece = servers.pieces()[p];
      total.num_lookups += steps[p].counts.num_lookups;
      total.num_admitted += steps[p].counts.num_admitted;
      total.num_evicted += steps[p].counts.num_evicted;
      EXPECT_TRUE(!piece.is_owner() || steps[p].new_rows.empty());
      for (const uint32_t row : steps[p].new_rows) {
        ++new_rows[piece.first_row() + row];
      }
    }
    EXPECT_EQ(total.num_lookups, single_process.admitted.counts.num_lookups);
    EXPECT_EQ(total.num_admitted, single_process.admitted.counts.num_admitted);
    EXPECT_EQ(total.num_evicted, single_process.admitted.counts.num_evicted);
    num_evicted += total.num_evicted;
    ASSERT_EQ(servers.deep.Bits(policy.admission == Admission::kCount),
              single_process.Bits())
        << number;
    // Both tables have the initial values of all new keys.
    std::map<int64_t, int64_t> new_keys;
    for (const NewKey& one : single_process.admitted.new_keys) {
      ++new_keys[one.row];
      for (const Servers* table : {&servers.wide, &servers.deep}) {
        const Server* server = nullptr;
        for (const auto& each : table->servers) {
          if (each->Has(one.key)) server = each.get();
        }
        std::vector<float> first(kDim);
        FillFirstValues(server->step.first_rows.values, one.key, first);
        const int64_t place = one.row - server->piece.first_row();
        for (int64_t c = 0; c < kDim; ++c) {
          EXPECT_EQ(server->rows[place * kDim + c], first[c]);
        }
      }
    }
    EXPECT_EQ(new_rows, new_keys);
  }
  EXPECT_EQ(num_evicted > 0, policy.eviction != Eviction::kNone);
}

TEST(KeyPiecesTest, AFailureLeavesAllPiecesOfASharedVocabularyUnchanged) {
  VocabularyPolicy policy = MakePolicy(Admission::kAll, Eviction::kNone);
  policy.fails_when_full = true;
  SharedServers servers(policy);
  servers.Request(RandomKeys(40, 1), RandomKeys(40, 2));
  std::vector<KeyPieceStep> steps = servers.steps(0);
  ASSERT_TRUE(AdmitToPieces(servers.pieces(), SerialFor, &steps).ok());
  const std::vector<int64_t> bits = servers.deep.Bits(false);
  const auto rows = [&] {
    std::vector<std::vector<float>> values;
    for (const auto& one : servers.wide.servers) values.push_back(one->rows);
    for (const auto& one : servers.deep.servers) values.push_back(one->rows);
    return values;
  };
  const std::vector<std::vector<float>> before = rows();
  // Only `wide` has more keys than the last server has rows.
  std::vector<int64_t> keys;
  for (int64_t key = 1000; keys.size() < 200; ++key) {
    if (servers.wide.servers[2]->Has(key)) keys.push_back(key);
  }
  servers.Request(keys, RandomKeys(90, 3));
  steps = servers.steps(1);
  Status status = AdmitToPieces(servers.pieces(), UnevenFor(2), &steps);
  EXPECT_NE(status.message().find("has no free row"), std::string::npos)
      << status.message();
  EXPECT_EQ(servers.deep.Bits(false), bits);
  EXPECT_EQ(rows(), before);
  // A piece that does not own the vocabulary can also stop the step.
  servers.Request({keys[0]}, RandomKeys(90, 3));
  steps = servers.steps(1);
  int64_t num_new = 0;
  steps[2].before_first_rows = [&](Span<const NewKey> new_keys) {
    num_new = new_keys.size();
    return InvalidArgument("no memory");
  };
  status = AdmitToPieces(servers.pieces(), UnevenFor(2), &steps);
  EXPECT_EQ(status.message(), "no memory");
  EXPECT_GT(num_new, 0);
  EXPECT_EQ(servers.deep.Bits(false), bits);
  EXPECT_EQ(rows(), before);
}

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
