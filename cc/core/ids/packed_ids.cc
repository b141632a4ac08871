#include "cc/core/ids/packed_ids.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/ragged_ids.h"

namespace layoutmap {
namespace {

using std::to_string;

Status WrongMark(const std::vector<FeatureSpec>& specs, int64_t sample) {
  std::string names;
  for (const FeatureSpec& spec : specs) {
    names += (names.empty() ? "'" : ", '") + spec.feature + "'";
  }
  return InvalidArgument(
      "A packed batch must have been packed from a structure with the paths of "
      "this embedding's feature_config, whose features are " +
      names +
      ". Received: one that was packed from others, or changed since "
      "(sample " +
      to_string(sample) + ")");
}

Status WrongSizes(int64_t sample, int64_t num_columns) {
  return InvalidArgument(
      "A packed batch, sample " + to_string(sample) +
      ": the numbers of ids of its features must be at least 0, and all ids in "
      "its " +
      to_string(num_columns) + " columns. Received: others");
}

}  // namespace

Status ReadPacked(const std::vector<FeatureSpec>& specs,
                  const PackedInput& input, std::vector<int64_t>* starts,
                  std::vector<FeatureInput<int64_t>>* features) {
  const MatrixView<const int64_t>& ids = input.ids;
  const auto num_features = static_cast<int64_t>(specs.size());
  if (ids.num_rows > INT32_MAX || ids.dim < 1 + num_features) {
    return InvalidArgument(
        "A packed batch of " + to_string(num_features) +
        " features must have at most 2^31 - 1 samples and at least " +
        to_string(1 + num_features) +
        " columns. Received: " + to_string(ids.num_rows) + " samples, " +
        to_string(ids.dim) + " columns");
  }
  if (input.weights.data != nullptr &&
      (input.weights.num_rows != ids.num_rows ||
       input.weights.dim != ids.dim)) {
    return InvalidArgument(
        "Packed weights must be of the shape of the packed batch, " +
        to_string(ids.num_rows) + " x " + to_string(ids.dim) +
        ". Received: " + to_string(input.weights.num_rows) + " x " +
        to_string(input.weights.dim));
  }
  starts->resize(ids.num_rows * (num_features + 1));
  int64_t* next = starts->data();
  for (int64_t s = 0; s < ids.num_rows; ++s) {
    const int64_t* row = ids.row(s);
    if (row[0] != input.mark) return WrongMark(specs, s);
    int64_t used = 1 + num_features;
    bool bad = false;
    for (int64_t f = 0; f < num_features; ++f) {
      *next++ = s * ids.dim + used;
      // Also a negative number is too many.
      bad |= static_cast<uint64_t>(row[1 + f]) >
             static_cast<uint64_t>(ids.dim - used);
      if (bad) return WrongSizes(s, ids.dim);
      used += row[1 + f];
    }
    *next++ = s * ids.dim + used;
  }
  features->resize(specs.size());
  for (int64_t f = 0; f < num_features; ++f) {
    FeatureInput<int64_t>& feature = (*features)[f];
    feature.form = Form::kPacked;
    feature.ids = {ids.data, ids.num_rows * ids.dim};
    feature.splits = *starts;
    feature.num_samples = ids.num_rows;
    if (input.weights.data != nullptr) {
      feature.weights = {input.weights.data, ids.num_rows * ids.dim};
    }
    feature.column = f;
    feature.num_columns = num_features + 1;
  }
  return Status();
}

Status IdPacker::Make(const std::vector<std::string>& names,
                      const std::vector<FeatureInput<int64_t>>& features,
                      IdPacker* packer) {
  IdPacker made;
  made.features_ = features;
  made.splits_.resize(features.size());
  made.num_samples_ = features.empty() ? 0 : features[0].num_samples;
  for (size_t f = 0; f < features.size(); ++f) {
    if (features[f].num_samples != made.num_samples_) {
      return InvalidArgument(
          "The features of a packed batch must have one number of samples. "
          "Received: feature '" +
          names[0] + "' with " + to_string(made.num_samples_) + ", feature '" +
          names[f] + "' with " + to_string(features[f].num_samples));
    }
    FeatureSpec spec;
    spec.feature = names[f];
    LM_RETURN_IF_ERROR(MakeSplits(spec, features[f], &made.splits_[f]));
    if (!features[f].weights.empty() &&
        features[f].weights.size() != features[f].ids.size()) {
      return InvalidArgument(
          "Feature '" + names[f] + "': weights must be one per id. Received: " +
          to_string(features[f].weights.size()) + " weights, " +
          to_string(features[f].ids.size()) + " ids");
    }
  }
  int64_t most_ids = 0;
  for (int64_t s = 0; s < made.num_samples_; ++s) {
    int64_t num_ids = 0;
    for (const std::vector<int64_t>& splits : made.splits_) {
      num_ids += splits[s + 1] - splits[s];
    }
    most_ids = std::max(most_ids, num_ids);
  }
  made.num_columns_ = 1 + static_cast<int64_t>(features.size()) + most_ids;
  *packer = std::move(made);
  return Status();
}

void IdPacker::Write(int64_t mark, MatrixView<int64_t> ids,
                     MatrixView<float> weights) const {
  const auto num_features = static_cast<int64_t>(features_.size());
  if (weights.data != nullptr) {
    std::fill_n(weights.data, weights.num_rows * weights.dim, 1.0f);
  }
  for (int64_t s = 0; s < num_samples_; ++s) {
    int64_t* row = ids.row(s);
    row[0] = mark;
    int64_t used = 1 + num_features;
    for (int64_t f = 0; f < num_features; ++f) {
      const FeatureInput<int64_t>& feature = features_[f];
      const int64_t first = splits_[f][s], size = splits_[f][s + 1] - first;
      row[1 + f] = size;
      std::copy_n(feature.ids.data() + first, size, row + used);
      if (weights.data != nullptr && !feature.weights.empty()) {
        std::copy_n(feature.weights.data() + first, size,
                    weights.row(s) + used);
      }
      used += size;
    }
    std::fill(row + used, row + ids.dim, int64_t{0});
  }
}

}  // namespace layoutmap
