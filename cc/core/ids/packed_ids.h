// A batch of all features as one matrix of ids: a tensor instead of one or two
// for each feature.

#ifndef TF_LAYOUTMAP_CORE_IDS_PACKED_IDS_H_
#define TF_LAYOUTMAP_CORE_IDS_PACKED_IDS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/ragged_ids.h"

namespace layoutmap {

// A row is a sample: a mark, then of each feature how many ids it has, then the
// ids of all features one after the other, then anything. The mark says which
// features these are, so that ids of others are refused.
//
//   mark  2 1  3 9  7  0 0
//   mark  0 3  8 1  4  0 0     two samples of two features
//
// Weights, if there are any, stand where the ids do.
struct PackedInput {
  int64_t mark = 0;
  MatrixView<const int64_t> ids;
  MatrixView<const float> weights;  // no data: 1 each
};

// Checks what the features of a batch have in common, and views each of them
// for `RaggedIds::Make`. The views look into `starts`, too: of each sample
// where the ids of each feature start, and the last ones end.
Status ReadPacked(const std::vector<FeatureSpec>& specs,
                  const PackedInput& input, std::vector<int64_t>* starts,
                  std::vector<FeatureInput<int64_t>>* features);

// Makes a packed batch of features, some of which may have weights.
class IdPacker {
 public:
  // Refuses features of different numbers of samples, and what
  // `RaggedIds::Make` refuses of splits and weights. `names` are for messages.
  static Status Make(const std::vector<std::string>& names,
                     const std::vector<FeatureInput<int64_t>>& features,
                     IdPacker* packer);

  int64_t num_samples() const { return num_samples_; }
  // The columns that the longest sample needs.
  int64_t num_columns() const { return num_columns_; }

  // Matrices with a row for each sample and enough columns; what stands behind
  // the ids becomes 0. Weights without data are not wanted; 1 where an id has
  // none.
  void Write(int64_t mark, MatrixView<int64_t> ids,
             MatrixView<float> weights) const;

 private:
  std::vector<FeatureInput<int64_t>> features_;
  std::vector<std::vector<int64_t>> splits_;  // of each feature
  int64_t num_samples_ = 0;
  int64_t num_columns_ = 0;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_IDS_PACKED_IDS_H_
