#include "cc/core/ids/ragged_ids.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/check_ids.h"
#include "cc/core/ids/combiner.h"
#include "gtest/gtest.h"

namespace layoutmap {
namespace {

using Splits = std::vector<int64_t>;
using Rows = std::vector<uint32_t>;

FeatureSpec Spec(Combiner combiner = Combiner::kSum, int64_t length = 0) {
  FeatureSpec spec;
  spec.feature = "clicked";
  spec.table = "ads";
  spec.num_rows = 10;
  spec.combiner = combiner;
  spec.max_sequence_length = length;
  return spec;
}

// Owns the data of a FeatureInput, which contains only views.
struct Input {
  Form form = Form::kRagged;
  std::vector<int64_t> ids;
  Splits splits;
  int64_t num_samples = 0;
  std::vector<float> weights;

  FeatureInput<int64_t> View() const {
    FeatureInput<int64_t> view;
    view.form = form;
    view.ids = ids;
    view.splits = splits;
    view.num_samples = num_samples;
    view.weights = weights;
    return view;
  }
};

RaggedIds MakeOk(const FeatureSpec& spec, const Input& input) {
  RaggedIds ids;
  const Status status = RaggedIds::Make(spec, input.View(), &ids);
  EXPECT_TRUE(status.ok()) << status.message();
  return ids;
}

std::string ErrorMessage(const FeatureSpec& spec, const Input& input) {
  // The object is initialized, so that the test detects if a failed call
  // changes it.
  RaggedIds ids = MakeOk(Spec(), {Form::kRagged, {4, 5}, {0, 2}, 1, {}});
  const Status status = RaggedIds::Make(spec, input.View(), &ids);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_EQ(ids.num_samples(), 1);
  EXPECT_EQ(Rows(ids.rows().begin(), ids.rows().end()), (Rows{4, 5}));
  return status.message();
}

template <typename T>
std::vector<T> ToVector(Span<const T> span) {
  return {span.begin(), span.end()};
}

TEST(RaggedIdsTest, RaggedSparseAndDenseFormsAreEquivalent) {
  const std::vector<int64_t> values = {3, 9, 0, 3};
  const Input ragged = {Form::kRagged, values, {0, 2, 4}, 2, {}};
  const Input sparse = {Form::kSparse, values, {0, 0, 0, 1, 1, 0, 1, 7}, 2, {}};
  const Input dense = {Form::kDense, values, {}, 2, {}};
  for (const Input& input : {ragged, sparse, dense}) {
    const RaggedIds ids = MakeOk(Spec(), input);
    EXPECT_EQ(ids.num_samples(), 2);
    EXPECT_EQ(ids.num_outputs(), 2);
    EXPECT_EQ(ToVector(ids.rows()), (Rows{3, 9, 0, 3}));
    EXPECT_EQ(ToVector(ids.splits()), (Splits{0, 2, 4}));
    EXPECT_TRUE(ids.gains().empty());
  }
}

// Calls `MakeView` for ids that this function keeps alive.
bool MakeView(const FeatureSpec& spec, const Input& input, RaggedIds* ids) {
  const auto owner = std::make_shared<Input>(input);
  return RaggedIds::MakeView(spec, owner->View(), owner, ids);
}

TEST(RaggedIdsTest, ViewsEqualCopies) {
  const std::vector<int64_t> values = {3, 9, 0, 3};
  const Input ragged = {Form::kRagged, values, {0, 1, 1, 4}, 3, {}};
  const Input dense = {Form::kDense, values, {}, 2, {}};
  const Input empty = {Form::kRagged, {}, {0}, 0, {}};
  for (const Input& input : {ragged, dense, empty}) {
    for (Combiner combiner :
         {Combiner::kSum, Combiner::kMean, Combiner::kSqrtn}) {
      const RaggedIds copy = MakeOk(Spec(combiner), input);
      RaggedIds view;
      ASSERT_TRUE(MakeView(Spec(combiner), input, &view));
      Rows rows;
      view.lookup_rows().With(
          [&](auto ids) { rows.assign(ids.begin(), ids.end()); });
      EXPECT_EQ(rows, ToVector(copy.rows()));
      EXPECT_EQ(ToVector(view.splits()), ToVector(copy.splits()));
      EXPECT_EQ(view.num_samples(), copy.num_samples());
      EXPECT_EQ(view.num_outputs(), copy.num_outputs());
      EXPECT_EQ(view.counts().num_ids, copy.counts().num_ids);
      EXPECT_TRUE(view.gains().empty());
      EXPECT_EQ(view.output_gains().size(),
                combiner == Combiner::kSum ? 0 : view.num_outputs());
      for (int64_t o = 0; o < view.output_gains().size(); ++o) {
        for (int64_t i = copy.splits()[o]; i < copy.splits()[o + 1]; ++i) {
          EXPECT_EQ(view.output_gains()[o], copy.gains()[i]);
        }
      }
    }
  }
}

TEST(RaggedIdsTest, OtherInputsMustBeCopied) {
  const int64_t lowest = std::numeric_limits<int64_t>::min();
  const Input good = {Form::kRagged, {4, 5, 6}, {0, 2, 3}, 2, {}};
  std::vector<Input> others(11, good);
  others[0].ids = {4, 10, 6};
  others[1].ids = {4, 5, -1};
  others[2].ids = {lowest, 5, 6};
  others[3].splits = {0, 4, 3};
  others[4].splits = {1, 2, 3};
  others[5].splits = {0, 2, 2};
  others[6].splits = {0, 3};
  others[7].splits = {0, lowest, 3};
  others[8].weights = {1, 1, 1};
  others[9].form = Form::kSparse;
  others[10].num_samples = -1;
  RaggedIds ids = MakeOk(Spec(), good);
  for (size_t i = 0; i < others.size(); ++i) {
    EXPECT_FALSE(MakeView(Spec(), others[i], &ids)) << i;
  }
  EXPECT_FALSE(MakeView(Spec(Combiner::kSum, 3), good, &ids));
  FeatureSpec without_rows = Spec();
  without_rows.num_rows = 0;
  EXPECT_FALSE(MakeView(without_rows, good, &ids));
  EXPECT_EQ(ToVector(ids.rows()), (Rows{4, 5, 6}));
  EXPECT_TRUE(MakeView(Spec(), good, &ids));
}

TEST(RaggedIdsTest, RangeChecksCoverAllIntegers) {
  const auto any = [](auto id, int64_t num_rows) {
    const std::vector<decltype(id)> ids = {0, id};
    return AnyOutside(Span<const decltype(id)>(ids), num_rows);
  };
  for (int64_t num_rows : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{1} << 31,
                           int64_t{1} << 32}) {
    for (int64_t id : {num_rows - 1, num_rows, int64_t{0}, int64_t{-1},
                       std::numeric_limits<int64_t>::min(),
                       std::numeric_limits<int64_t>::max(), int64_t{1} << 31}) {
      const bool expected = num_rows == 0 || IsOutside(id, num_rows);
      EXPECT_EQ(any(id, num_rows), expected) << id << ", " << num_rows;
      const auto narrow = static_cast<int32_t>(id);
      EXPECT_EQ(any(narrow, num_rows),
                num_rows == 0 || IsOutside(narrow, num_rows))
          << narrow << ", " << num_rows;
    }
  }
}

TEST(RaggedIdsTest, Int32IdsAreEquivalent) {
  const std::vector<int32_t> values = {3, 9, 0};
  const Splits splits = {0, 3};
  FeatureInput<int32_t> input;
  input.ids = values;
  input.splits = splits;
  input.num_samples = 1;
  RaggedIds ids;
  ASSERT_TRUE(RaggedIds::Make(Spec(), input, &ids).ok());
  EXPECT_EQ(ToVector(ids.rows()), (Rows{3, 9, 0}));
  const std::vector<int32_t> negative = {3, -1, 0};
  input.ids = negative;
  EXPECT_EQ(RaggedIds::Make(Spec(), input, &ids).message(),
            "Feature 'clicked', sample 0: id -1 is outside table 'ads' with 10 "
            "rows");
}

TEST(RaggedIdsTest, EmptySamplesAndEmptyBatchesAreValid) {
  const RaggedIds sparse =
      MakeOk(Spec(), {Form::kSparse, {1, 2}, {1, 0, 3, 0}, 5, {}});
  EXPECT_EQ(ToVector(sparse.splits()), (Splits{0, 0, 1, 1, 2, 2}));
  for (Form form : {Form::kRagged, Form::kSparse, Form::kDense}) {
    const Splits none = form == Form::kRagged ? Splits{0} : Splits{};
    const RaggedIds empty = MakeOk(Spec(), {form, {}, none, 0, {}});
    EXPECT_EQ(empty.num_outputs(), 0);
    EXPECT_TRUE(empty.rows().empty());
    const Splits zeros = form == Form::kRagged ? Splits{0, 0, 0, 0} : Splits{};
    EXPECT_EQ(MakeOk(Spec(), {form, {}, zeros, 3, {}}).num_outputs(), 3);
  }
}

TEST(RaggedIdsTest, GainsAreStoredOnlyIfNotAllAreOne) {
  const Input plain = {Form::kRagged, {1, 2, 3}, {0, 2, 3}, 2, {}};
  EXPECT_TRUE(MakeOk(Spec(Combiner::kSum), plain).gains().empty());
  EXPECT_EQ(ToVector(MakeOk(Spec(Combiner::kMean), plain).gains()),
            (std::vector<float>{0.5, 0.5, 1}));
  Input weighted = plain;
  weighted.weights = {2, 6, 5};
  EXPECT_EQ(ToVector(MakeOk(Spec(Combiner::kSum), weighted).gains()),
            weighted.weights);
  EXPECT_EQ(ToVector(MakeOk(Spec(Combiner::kMean), weighted).gains()),
            (std::vector<float>{0.25, 0.75, 1}));
}

TEST(RaggedIdsTest, ASequenceKeepsTheFirstIdsOfASample) {
  const Input input = {
      Form::kRagged, {1, 2, 3, 4, 5, 6}, {0, 4, 4, 5, 6}, 4, {}};
  const RaggedIds ids = MakeOk(Spec(Combiner::kSum, 3), input);
  EXPECT_EQ(ids.num_samples(), 4);
  EXPECT_EQ(ids.num_outputs(), 12);
  EXPECT_EQ(ToVector(ids.rows()), (Rows{1, 2, 3, 5, 6}));
  EXPECT_EQ(ToVector(ids.splits()),
            (Splits{0, 1, 2, 3, 3, 3, 3, 4, 4, 4, 5, 5, 5}));
  EXPECT_TRUE(ids.gains().empty());
}

TEST(RaggedIdsTest, ASparseSequenceKeepsItsGaps) {
  const Input input = {
      Form::kSparse, {6, 7, 8, 9}, {0, 1, 0, 5, 2, 0, 2, 2}, 3, {}};
  const RaggedIds ids = MakeOk(Spec(Combiner::kSum, 3), input);
  EXPECT_EQ(ids.num_outputs(), 9);
  EXPECT_EQ(ToVector(ids.rows()), (Rows{6, 8, 9}));
  EXPECT_EQ(ToVector(ids.splits()), (Splits{0, 0, 1, 1, 1, 1, 1, 2, 2, 3}));
  EXPECT_EQ(ids.counts().num_truncated, 1);
}

TEST(RaggedIdsTest, RejectsSequencePositionsThatDoNotAscend) {
  const FeatureSpec spec = Spec(Combiner::kSum, 3);
  EXPECT_NE(ErrorMessage(spec, {Form::kSparse, {1, 2}, {0, 0, 1, -1}, 2, {}})
                .find("'clicked', sample 1: the positions of a sequence"),
            std::string::npos);
  for (const int64_t second : {1, 0}) {
    EXPECT_NE(
        ErrorMessage(spec, {Form::kSparse, {1, 2}, {0, 1, 0, second}, 1, {}})
            .find("position " + std::to_string(second) +
                  " after 1 (id number 1)"),
        std::string::npos);
  }
}

TEST(RaggedIdsTest, ASequenceIgnoresTheCombiner) {
  const Input input = {Form::kRagged, {1, 2}, {0, 2}, 1, {}};
  EXPECT_TRUE(MakeOk(Spec(Combiner::kMean, 2), input).gains().empty());
}

TEST(RaggedIdsTest, ReportsTheSampleOfAnIdOutsideTheTable) {
  for (int64_t id : {int64_t{-1}, int64_t{10}, int64_t{1} << 32, INT64_MIN,
                     INT64_MAX, (int64_t{1} << 32) + 3}) {
    EXPECT_EQ(
        ErrorMessage(Spec(), {Form::kRagged, {1, 2, id}, {0, 1, 1, 3}, 3, {}}),
        "Feature 'clicked', sample 2: id " + std::to_string(id) +
            " is outside table 'ads' with 10 rows");
  }
  // Ids after the maximum sequence length are also checked.
  EXPECT_NE(ErrorMessage(Spec(Combiner::kSum, 1),
                         {Form::kRagged, {1, 10}, {0, 2}, 1, {}}),
            "");
}

TEST(RaggedIdsTest, RejectsInvalidRowSplits) {
  struct Case {
    Splits splits;
    int64_t num_samples;
    std::string words;
  };
  const std::vector<Case> cases = {
      {{0, 1, 3},
       1,
       "have num_samples + 1 values. Received: 3 values, 1 samples"},
      {{}, 0, "have num_samples + 1 values. Received: 0 values"},
      {{1, 3}, 1, "start with 0. Received: 1"},
      {{-1, 3}, 1, "start with 0. Received: -1"},
      {{0, 2, 1, 3}, 3, "not decrease. Received: 2, then 1 (sample 1)"},
      {{0, INT64_MAX, 3}, 2, "not decrease"},
      {{0, INT64_MIN, 3}, 2, "not decrease"},
      {{0, 2}, 1, "end with the number of ids. Received: 2, with 3 ids"},
      {{0, 4}, 1, "end with the number of ids. Received: 4, with 3 ids"},
      {{0}, 0, "end with the number of ids. Received: 0, with 3 ids"},
  };
  for (const Case& c : cases) {
    const std::string message = ErrorMessage(
        Spec(), {Form::kRagged, {1, 2, 3}, c.splits, c.num_samples, {}});
    EXPECT_NE(message.find("Feature 'clicked': row_splits must " + c.words),
              std::string::npos)
        << message;
  }
}

TEST(RaggedIdsTest, RejectsSparseIndicesThatAreOutsideOrUnordered) {
  const auto error_message = [](const Splits& indices) {
    return ErrorMessage(Spec(), {Form::kSparse, {1, 2}, indices, 2, {}});
  };
  EXPECT_NE(error_message({0, 0, 2, 0})
                .find("inside its 2 samples. Received: sample 2 (id number 1)"),
            std::string::npos);
  EXPECT_NE(
      error_message({-1, 0, 0, 0}).find("Received: sample -1 (id number 0)"),
      std::string::npos);
  EXPECT_NE(error_message({1, 0, 0, 0})
                .find("use tf.sparse.reorder. Received: sample 0 after 1"),
            std::string::npos);
  EXPECT_NE(error_message({0, 0}).find("[num_ids, 2]"), std::string::npos);
  EXPECT_NE(error_message({INT64_MAX, 0, INT64_MIN, 0}), "");
}

TEST(RaggedIdsTest, RejectsDenseIdsThatDoNotFillTheirSamples) {
  EXPECT_NE(ErrorMessage(Spec(), {Form::kDense, {1, 2, 3}, {}, 2, {}})
                .find("the same number of ids for each sample. Received: 3 "
                      "ids, 2 samples"),
            std::string::npos);
  EXPECT_NE(ErrorMessage(Spec(), {Form::kDense, {1}, {}, 0, {}}), "");
}

TEST(RaggedIdsTest, RejectsInvalidBatchSizes) {
  for (Form form : {Form::kRagged, Form::kSparse, Form::kDense}) {
    for (int64_t num_samples :
         {int64_t{-1}, int64_t{1} << 31, INT64_MIN, INT64_MAX}) {
      EXPECT_NE(ErrorMessage(Spec(), {form, {}, {}, num_samples, {}}), "");
    }
    // The size check must fail before memory is allocated.
    EXPECT_NE(ErrorMessage(Spec(Combiner::kSum, int64_t{1} << 40),
                           {form, {}, {}, 1 << 20, {}})
                  .find("activation rows"),
              std::string::npos);
    EXPECT_NE(
        ErrorMessage(Spec(Combiner::kSum, INT64_MAX), {form, {}, {}, 2, {}}),
        "");
  }
}

TEST(RaggedIdsTest, RejectsTablesWithTooManyRows) {
  FeatureSpec spec = Spec();
  for (int64_t num_rows : {(int64_t{1} << 32) + 1, INT64_MAX, int64_t{-1}}) {
    spec.num_rows = num_rows;
    EXPECT_NE(ErrorMessage(spec, {Form::kRagged, {1}, {0, 1}, 1, {}})
                  .find("0 to 2^32 rows"),
              std::string::npos);
  }
  spec.num_rows = int64_t{1} << 32;
  const RaggedIds ids =
      MakeOk(spec, {Form::kRagged, {UINT32_MAX}, {0, 1}, 1, {}});
  EXPECT_EQ(ids.rows()[0], UINT32_MAX);
}

TEST(RaggedIdsTest, RejectsWeightsThatAreNotOnePerIdOrNotFinite) {
  Input input = {Form::kRagged, {1, 2, 3}, {0, 1, 3}, 2, {1, 2}};
  EXPECT_NE(ErrorMessage(Spec(), input)
                .find("weights must be one per id. Received: 2 weights, 3 ids"),
            std::string::npos);
  for (float bad : {std::numeric_limits<float>::quiet_NaN(),
                    std::numeric_limits<float>::infinity(),
                    -std::numeric_limits<float>::infinity()}) {
    input.weights = {1, 2, bad};
    EXPECT_NE(
        ErrorMessage(Spec(), input).find("sample 1: a weight must be finite"),
        std::string::npos);
  }
  input.weights = {1, 2, 3};
  EXPECT_NE(ErrorMessage(Spec(Combiner::kSum, 2), input)
                .find("a sequence feature takes no weights"),
            std::string::npos);
}

FeatureSpec MakeSpec(OutOfRange out_of_range, Combiner combiner,
                     int64_t length = 0) {
  FeatureSpec spec = Spec(combiner, length);
  spec.out_of_range = out_of_range;
  return spec;
}

std::vector<float> GainsOf(const RaggedIds& ids) {
  return {ids.gains().begin(), ids.gains().end()};
}

TEST(RaggedIdsTest, DroppedIdsAreIgnored) {
  const FeatureSpec spec = MakeSpec(OutOfRange::kDrop, Combiner::kMean);
  const RaggedIds ids = MakeOk(
      spec,
      {Form::kRagged, {-1, 4, 10, 5, 11}, {0, 2, 4, 5}, 3, {8, 3, 9, 2, 1}});
  const RaggedIds expected = MakeOk(
      Spec(Combiner::kMean), {Form::kRagged, {4, 5}, {0, 1, 2, 2}, 3, {3, 2}});
  EXPECT_EQ(Rows(ids.rows().begin(), ids.rows().end()), (Rows{4, 5}));
  EXPECT_EQ(Splits(ids.splits().begin(), ids.splits().end()),
            (Splits{0, 1, 2, 2}));
  EXPECT_EQ(GainsOf(ids), GainsOf(expected));
  EXPECT_EQ(ids.counts().num_ids, 5);
  EXPECT_EQ(ids.counts().num_dropped, 3);
}

TEST(RaggedIdsTest, ADroppedIdLeavesItsSequencePositionEmpty) {
  const RaggedIds ids =
      MakeOk(MakeSpec(OutOfRange::kDrop, Combiner::kSum, 2),
             {Form::kRagged, {-1, 4, 5, 6, 7, 99}, {0, 2, 6}, 2, {}});
  EXPECT_EQ(Rows(ids.rows().begin(), ids.rows().end()), (Rows{4, 5, 6}));
  EXPECT_EQ(Splits(ids.splits().begin(), ids.splits().end()),
            (Splits{0, 0, 1, 2, 3}));
  EXPECT_EQ(ids.counts().num_truncated, 2);
}

TEST(RaggedIdsTest, ClippedIdsBecomeTheNearestRow) {
  const RaggedIds ids =
      MakeOk(MakeSpec(OutOfRange::kClip, Combiner::kSum),
             {Form::kDense, {-1, 4, 10, int64_t{1} << 40}, {}, 2, {}});
  EXPECT_EQ(Rows(ids.rows().begin(), ids.rows().end()), (Rows{0, 4, 9, 9}));
  EXPECT_EQ(ids.counts().num_clipped, 3);
  EXPECT_EQ(ids.counts().num_dropped, 0);
}

TEST(RaggedIdsTest, WeightsOfDroppedIdsAreChecked) {
  EXPECT_NE(ErrorMessage(MakeSpec(OutOfRange::kDrop, Combiner::kSum),
                         {Form::kRagged, {-1}, {0, 1}, 1, {std::nanf("")}})
                .find("must be finite"),
            std::string::npos);
}

TEST(RaggedIdsTest, OutOfRangePoliciesAreParsedByName) {
  OutOfRange found = OutOfRange::kError;
  EXPECT_TRUE(ParseOutOfRange("drop", &found).ok());
  EXPECT_EQ(found, OutOfRange::kDrop);
  EXPECT_NE(ParseOutOfRange("ignore", &found).message().find("ignore"),
            std::string::npos);
}

}  // namespace
}  // namespace layoutmap
