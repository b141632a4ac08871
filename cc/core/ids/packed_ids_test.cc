#include "cc/core/ids/packed_ids.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cc/core/base/parallel_for.h"
#include "cc/core/base/parallel_for_test.h"
#include "cc/core/base/status.h"
#include "cc/core/ids/combiner.h"
#include "cc/core/ids/ragged_ids.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

constexpr int64_t kMark = -77;

std::vector<FeatureSpec> Specs() {
  std::vector<FeatureSpec> specs(3);
  const char* const names[] = {"a", "b", "c"};
  for (size_t f = 0; f < specs.size(); ++f) {
    specs[f].feature = names[f];
    specs[f].table = "words";
    specs[f].num_rows = 10;
  }
  specs[1].combiner = Combiner::kMean;
  specs[2].max_sequence_length = 2;
  return specs;
}

// Ids that are indexed by feature, then by sample.
using Ids = std::vector<std::vector<std::vector<int64_t>>>;

struct Packed {
  int64_t num_samples = 0, num_columns = 0;
  std::vector<int64_t> ids;
  std::vector<float> weights;

  explicit Packed(const Ids& features, int64_t more_columns = 0) {
    num_samples = static_cast<int64_t>(features[0].size());
    num_columns = 1 + static_cast<int64_t>(features.size()) + more_columns;
    std::vector<std::vector<int64_t>> rows;
    for (int64_t s = 0; s < num_samples; ++s) {
      std::vector<int64_t>& row = rows.emplace_back(1, kMark);
      for (const auto& feature : features) row.push_back(feature[s].size());
      for (const auto& feature : features) {
        row.insert(row.end(), feature[s].begin(), feature[s].end());
      }
      num_columns = std::max<int64_t>(num_columns, row.size());
    }
    for (std::vector<int64_t>& row : rows) {
      // The padding can have any value.
      row.resize(num_columns, -3);
      ids.insert(ids.end(), row.begin(), row.end());
    }
  }
  PackedInput View() const {
    PackedInput input;
    input.mark = kMark;
    input.ids = {ids.data(), num_samples, num_columns};
    if (!weights.empty()) {
      input.weights = {weights.data(), num_samples, num_columns};
    }
    return input;
  }
};

Status Make(const Packed& packed, std::vector<RaggedIds>* made,
            const std::vector<FeatureSpec>& specs = Specs()) {
  UnpackedIds unpacked;
  LM_RETURN_IF_ERROR(
      UnpackedIds::Make(specs, packed.View(), UnevenFor(3), &unpacked));
  if (unpacked.TakeRows(specs, UnevenFor(3), made)) return Status();
  const std::vector<FeatureInput<int64_t>> features = unpacked.features();
  made->resize(specs.size());
  for (size_t f = 0; f < specs.size(); ++f) {
    LM_RETURN_IF_ERROR(RaggedIds::Make(specs[f], features[f], &(*made)[f]));
  }
  return Status();
}

std::string ErrorMessage(const Packed& packed) {
  std::vector<RaggedIds> made;
  const Status status = Make(packed, &made);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  return status.message();
}

template <typename T>
std::vector<T> ToVector(Span<const T> span) {
  return {span.begin(), span.end()};
}

// Expects that the packed batch has the same result as separate features.
void ExpectEqualsFeatures(const Ids& features, const Packed& packed,
                          const std::vector<FeatureSpec>& specs = Specs()) {
  std::vector<RaggedIds> made;
  const Status status = Make(packed, &made, specs);
  ASSERT_TRUE(status.ok()) << status.message();
  for (size_t f = 0; f < features.size(); ++f) {
    std::vector<int64_t> ids, splits = {0};
    for (const auto& sample : features[f]) {
      ids.insert(ids.end(), sample.begin(), sample.end());
      splits.push_back(static_cast<int64_t>(ids.size()));
    }
    FeatureInput<int64_t> input;
    input.ids = ids;
    input.splits = splits;
    input.num_samples = packed.num_samples;
    RaggedIds expected;
    ASSERT_TRUE(RaggedIds::Make(specs[f], input, &expected).ok());
    EXPECT_EQ(made[f].num_samples(), expected.num_samples());
    EXPECT_EQ(ToVector(made[f].rows()), ToVector(expected.rows()));
    EXPECT_EQ(ToVector(made[f].splits()), ToVector(expected.splits()));
    EXPECT_EQ(ToVector(made[f].gains()), ToVector(expected.gains()));
    EXPECT_EQ(made[f].counts().num_ids, expected.counts().num_ids);
    EXPECT_EQ(made[f].counts().num_dropped, expected.counts().num_dropped);
    EXPECT_EQ(made[f].counts().num_clipped, expected.counts().num_clipped);
    EXPECT_EQ(made[f].counts().num_truncated, expected.counts().num_truncated);
  }
}

// Returns feature specs without sequences, so that the ids are converted to
// rows while they are read.
std::vector<FeatureSpec> SpecsWithoutSequences(OutOfRange out_of_range) {
  std::vector<FeatureSpec> specs = Specs();
  specs[2].max_sequence_length = 0;
  specs[2].combiner = Combiner::kSqrtn;
  for (FeatureSpec& spec : specs) spec.out_of_range = out_of_range;
  return specs;
}

bool View(const Packed& packed, const std::vector<FeatureSpec>& specs,
          std::vector<RaggedIds>* views) {
  const auto owner = std::make_shared<Packed>(packed);
  return ViewPackedIds(specs, owner->View(), owner, UnevenFor(3), views);
}

// Returns the specs of two features that are not sequences.
std::vector<FeatureSpec> SimpleSpecs() {
  std::vector<FeatureSpec> specs = Specs();
  specs.pop_back();
  specs[1].num_rows = 100;
  return specs;
}

TEST(PackedIdsTest, ViewsEqualUnpackedIds) {
  for (int64_t num_samples : {1, 3, 300, 600}) {
    for (int64_t more_columns : {0, 3}) {
      std::mt19937 random(1);
      Ids features(2);
      for (int64_t s = 0; s < num_samples; ++s) {
        features[0].push_back({static_cast<int64_t>(random() % 10)});
        features[1].push_back({static_cast<int64_t>(random() % 100), 99, 0});
      }
      const Packed packed(features, more_columns);
      std::vector<RaggedIds> views, unpacked;
      ASSERT_TRUE(View(packed, SimpleSpecs(), &views));
      ASSERT_TRUE(Make(packed, &unpacked, SimpleSpecs()).ok());
      ASSERT_EQ(views.size(), 2);
      for (size_t f = 0; f < 2; ++f) {
        const EvenIds& even = views[f].even();
        std::vector<uint32_t> rows;
        views[f].lookup_rows().With([&](auto ids) {
          for (int64_t o = 0; o < views[f].num_outputs(); ++o) {
            for (int64_t i = 0; i < even.size; ++i) {
              rows.push_back(
                  static_cast<uint32_t>(ids[even.first + o * even.stride + i]));
            }
          }
        });
        EXPECT_EQ(rows, ToVector(unpacked[f].rows()));
        EXPECT_EQ(views[f].num_samples(), num_samples);
        EXPECT_EQ(views[f].num_outputs(), unpacked[f].num_outputs());
        EXPECT_EQ(views[f].counts().num_ids, unpacked[f].counts().num_ids);
        for (const float gain : views[f].output_gains()) {
          EXPECT_EQ(gain, unpacked[f].gains()[0]);
        }
      }
      EXPECT_TRUE(views[0].output_gains().empty());
      EXPECT_EQ(views[1].output_gains().size(), num_samples);
    }
  }
}

TEST(PackedIdsTest, OtherBatchesMustBeUnpacked) {
  const Ids features = {{{1}, {2}, {3}}, {{5, 99}, {7, 8}, {0, 1}}};
  const Packed good(features);
  std::vector<RaggedIds> views;
  EXPECT_TRUE(View(good, SimpleSpecs(), &views));
  std::vector<Packed> others(7, good);
  const int64_t last = 2 * good.num_columns;
  others[0].ids[last] = kMark + 1;
  others[1].ids[last + 1] = 0;
  others[2].ids[last + 3] = 10;
  others[3].ids[last + 4] = -1;
  others[4].ids[last + 5] = std::numeric_limits<int64_t>::min();
  others[5].weights.assign(good.ids.size(), 1.0f);
  others[6].ids[2] = 9;
  for (size_t i = 0; i < others.size(); ++i) {
    EXPECT_FALSE(View(others[i], SimpleSpecs(), &views)) << i;
  }
  EXPECT_FALSE(View(Packed(Ids(2)), SimpleSpecs(), &views));
  EXPECT_FALSE(
      View(Packed(Ids{{{1}, {2, 3}}, {{4}, {5}}}), SimpleSpecs(), &views));
  EXPECT_FALSE(View(Packed(Ids{{{1}}, {{2}}, {{3}}}), Specs(), &views));
  std::vector<FeatureSpec> empty_table = SimpleSpecs();
  empty_table[0].num_rows = 0;
  EXPECT_FALSE(View(good, empty_table, &views));
}

TEST(PackedIdsTest, IdsAreConvertedToRowsWhileTheyAreRead) {
  std::mt19937 random(9);
  for (int i = 0; i < 60; ++i) {
    const bool has_bad_id = i % 2 == 1;
    const auto specs = SpecsWithoutSequences(i % 4 < 2 ? OutOfRange::kDrop
                                                       : OutOfRange::kClip);
    Ids features(3, std::vector<std::vector<int64_t>>(
                        i % 10 < 2 ? 700 : 1 + random() % 6));
    for (auto& feature : features) {
      for (auto& sample : feature) {
        sample.resize(random() % 4);
        for (int64_t& id : sample) id = random() % 10;
      }
    }
    // The test cases include an invalid id at the first or the last position of
    // each feature.
    features[random() % 3].back() = {9, 0};
    if (has_bad_id) {
      const int64_t bad[] = {-1, 10, int64_t{1} << 32, INT64_MIN};
      features[random() % 3].back() = {9, bad[random() % 4]};
    }
    const Packed packed(features, random() % 3);
    UnpackedIds unpacked;
    ASSERT_TRUE(
        UnpackedIds::Make(specs, packed.View(), UnevenFor(3), &unpacked).ok());
    std::vector<RaggedIds> made;
    EXPECT_EQ(unpacked.TakeRows(specs, SerialFor, &made), !has_bad_id);
    ExpectEqualsFeatures(features, packed, specs);
  }
}

TEST(PackedIdsTest, AnIdOutsideItsTableIsReportedWithItsFeature) {
  const Ids features = {{{1}, {2}}, {{3, 4}, {}}, {{5}, {6, 10}}};
  std::vector<RaggedIds> made;
  const Status status =
      Make(Packed(features), &made, SpecsWithoutSequences(OutOfRange::kError));
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "Feature 'c', sample 1: id 10 is outside table 'words' with 10 "
            "rows");
}

TEST(PackedIdsTest, RandomBatchesEqualTheirFeatures) {
  std::mt19937 random(7);
  for (int i = 0; i < 50; ++i) {
    // Every tenth batch has more samples than one thread reads at a time.
    const size_t num_samples = i % 10 == 0 ? 700 : random() % 6;
    Ids features(3, std::vector<std::vector<int64_t>>(num_samples));
    for (auto& feature : features) {
      for (auto& sample : feature) {
        sample.resize(random() % 4);
        for (int64_t& id : sample) id = random() % 10;
      }
    }
    ExpectEqualsFeatures(features, Packed(features));
    ExpectEqualsFeatures(features, Packed(features, 5));
    // If all weights of a feature are 1, they have no effect, even if another
    // feature has other weights.
    Packed weighted(features);
    weighted.weights.assign(weighted.ids.size(), 1.0f);
    ExpectEqualsFeatures(features, weighted);
  }
}

TEST(PackedIdsTest, WeightsAreReadWithTheirIds) {
  Packed packed({{{1}, {2, 3}}, {{4, 5}, {}}, {{6}, {7}}});
  ASSERT_EQ(packed.num_columns, 8);
  packed.weights = {9, 9, 9, 9, 2, 1, 3, 1, 9, 9, 9, 9, 4, 5, 1, 9};
  std::vector<RaggedIds> made;
  ASSERT_TRUE(Make(packed, &made).ok());
  EXPECT_EQ(ToVector(made[0].gains()), (std::vector<float>{2, 4, 5}));
  EXPECT_EQ(ToVector(made[1].gains()), (std::vector<float>{0.25f, 0.75f}));
  EXPECT_TRUE(made[2].gains().empty());
}

TEST(PackedIdsTest, SequenceFeaturesRejectWeights) {
  Packed packed({{{1}}, {{4}}, {{6}}});
  packed.weights = {1, 1, 1, 1, 1, 1, 0.5f};
  EXPECT_NE(
      ErrorMessage(packed).find("Feature 'c': a sequence feature takes no "
                                "weights"),
      std::string::npos);
}

TEST(PackedIdsTest, InvalidBatchesAreRejected) {
  const Ids features = {{{1}, {2}}, {{4, 5}, {}}, {{6}, {7}}};
  const Packed valid(features);
  ASSERT_EQ(valid.num_columns, 8);
  Packed packed = valid;
  packed.ids[8] = kMark + 1;
  EXPECT_NE(ErrorMessage(packed).find("whose features are 'a', 'b', 'c'"),
            std::string::npos);
  EXPECT_NE(ErrorMessage(packed).find("sample 1"), std::string::npos);
  // The bitwise complement of a number of ids marks strings.
  packed = valid;
  packed.ids[8 + 2] = ~packed.ids[8 + 2];
  EXPECT_NE(ErrorMessage(packed).find("Feature 'b' of a packed batch must have "
                                      "integer ids"),
            std::string::npos);
  EXPECT_NE(ErrorMessage(packed).find("strings (sample 1)"), std::string::npos);
  // Tests invalid numbers of ids: negative numbers, a number that is too large,
  // and a number that overflows if the next number is added.
  for (int64_t size : {int64_t{-7}, int64_t{5}, INT64_MAX, INT64_MIN}) {
    for (int place : {1, 2, 3}) {
      packed = valid;
      packed.ids[8 + place] = size;
      EXPECT_NE(ErrorMessage(packed).find("sample 1: the numbers of ids"),
                std::string::npos);
    }
  }
  packed = valid;
  packed.num_columns = 3;
  EXPECT_NE(ErrorMessage(packed).find("at least 4 columns"), std::string::npos);
  packed = valid;
  packed.ids[4] = 10;
  EXPECT_NE(ErrorMessage(packed).find("Feature 'a', sample 0: id 10"),
            std::string::npos);
  PackedInput input = valid.View();
  const std::vector<float> weights(100);
  input.weights = {weights.data(), 2, 7};
  UnpackedIds unpacked;
  EXPECT_NE(UnpackedIds::Make(Specs(), input, SerialFor, &unpacked)
                .message()
                .find("Packed weights must have the shape"),
            std::string::npos);
}

TEST(PackedIdsTest, PackedFeaturesAreReadUnchanged) {
  const Ids features = {{{1}, {2, 3}}, {{4, 5}, {}}, {{6}, {7}}};
  std::vector<std::vector<int64_t>> ids(3), splits(3, {0});
  std::vector<FeatureInput<int64_t>> inputs(3);
  for (size_t f = 0; f < 3; ++f) {
    for (const auto& sample : features[f]) {
      ids[f].insert(ids[f].end(), sample.begin(), sample.end());
      splits[f].push_back(static_cast<int64_t>(ids[f].size()));
    }
    inputs[f].ids = ids[f];
    inputs[f].splits = splits[f];
    inputs[f].num_samples = 2;
  }
  IdPacker packer;
  ASSERT_TRUE(IdPacker::Make({"a", "b", "c"}, inputs, &packer).ok());
  Packed packed(features);
  EXPECT_EQ(packer.num_samples(), 2);
  EXPECT_EQ(packer.num_columns(), packed.num_columns);
  packed.ids.assign(packed.ids.size(), -9);
  packer.Write(kMark, {packed.ids.data(), 2, packed.num_columns}, {});
  EXPECT_EQ(packed.ids.back(), 0);
  ExpectEqualsFeatures(features, packed);
  inputs[1].num_samples = 1;
  EXPECT_NE(IdPacker::Make({"a", "b", "c"}, inputs, &packer)
                .message()
                .find("feature 'a' with 2, feature 'b' with 1"),
            std::string::npos);
}

}  // namespace
}  // namespace layoutmap
