// A batch of all features as one matrix of ids: a tensor instead of one or two
// for each feature.

#ifndef TF_LAYOUTMAP_CORE_IDS_PACKED_IDS_H_
#define TF_LAYOUTMAP_CORE_IDS_PACKED_IDS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cc/core/base/parallel_for.h"
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

// The features of a packed batch, each with its ids one after the other.
class UnpackedIds {
 public:
  // Checks what the features have in common: marks, and where their ids are.
  static Status Make(const std::vector<FeatureSpec>& specs,
                     const PackedInput& input, const ParallelFor& parallel_for,
                     UnpackedIds* unpacked);

  // The features themselves, if nothing of them needs a second look: no
  // weights, no sequences, and no id outside of its table. Else false.
  bool TakeRows(const std::vector<FeatureSpec>& specs,
                const ParallelFor& parallel_for,
                std::vector<RaggedIds>* features) const;

  // Else views of each feature, for `RaggedIds::Make`.
  std::vector<FeatureInput<int64_t>> features() const;

 private:
  struct Chunks;

  // Take samples [first, last) of a checked batch. `next` says where the ids of
  // each feature go, by `put(feature, place, id)`; `all_one` becomes 0 where a
  // weight is not 1.
  template <typename Put>
  void WriteIds(const PackedInput& input, int64_t first, int64_t last,
                int64_t* next, const Put& put);
  void WriteWeights(const PackedInput& input, int64_t first, int64_t last,
                    uint8_t* all_one);

  int64_t num_samples_ = 0;
  std::vector<int64_t> starts_;  // of the ids of each feature
  // Of each feature, whether all weights are 1, as if it had none.
  std::vector<bool> all_one_;
  std::unique_ptr<int64_t[]> ids_;
  std::shared_ptr<uint32_t[]> rows_;   // instead of ids_, if `TakeRows` works
  std::shared_ptr<int64_t[]> splits_;  // of each feature
  std::unique_ptr<float[]> weights_;
};

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
