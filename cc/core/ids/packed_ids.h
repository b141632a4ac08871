// A packed batch: the ids of all features in one matrix. A packed batch is a
// single tensor. Other batches have one or two tensors per feature.

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

// Each row of the matrix is a sample. The row contains a mark, the number of
// ids of each feature, the ids of all features in order, and padding. The mark
// identifies the list of features. A batch with another mark is rejected.
//
//   mark  2 1  3 9  7  0 0
//   mark  0 3  8 1  4  0 0     two samples of two features
//
// The weights are optional. The weight of an id has the same position as the
// id.
struct PackedInput {
  int64_t mark = 0;
  MatrixView<const int64_t> ids;
  MatrixView<const float> weights;  // If it has no data, all weights are 1.
};

// The features of a packed batch after unpacking. The ids of each feature are
// contiguous.
class UnpackedIds {
 public:
  // Checks the marks and the numbers of ids in each sample.
  static Status Make(const std::vector<FeatureSpec>& specs,
                     const PackedInput& input, const ParallelFor& parallel_for,
                     UnpackedIds* unpacked);

  // Sets `features` and returns true if no feature needs further checks, that
  // is, if the batch has no weights, no sequences and no out-of-range ids.
  // Otherwise, returns false.
  bool TakeRows(const std::vector<FeatureSpec>& specs,
                const ParallelFor& parallel_for,
                std::vector<RaggedIds>* features) const;

  // Returns a view of each feature for `RaggedIds::Make`. Call this function
  // only if `TakeRows` returned false.
  std::vector<FeatureInput<int64_t>> features() const;

 private:
  struct Chunks;

  // Reads samples [first, last) of a checked batch. Calls `put(feature, place,
  // id)` for each id. `next[f]` is the place of the next id of feature f, and
  // the function increments it after each id.
  template <typename Put>
  void WriteIds(const PackedInput& input, int64_t first, int64_t last,
                int64_t* next, const Put& put);
  // Reads the weights of samples [first, last). Sets all_one[f] to 0 if feature
  // f has a weight other than 1.
  void WriteWeights(const PackedInput& input, int64_t first, int64_t last,
                    uint8_t* all_one);

  int64_t num_samples_ = 0;
  // Index of the first id of each feature.
  std::vector<int64_t> starts_;
  // For each feature, whether all weights are 1.
  std::vector<bool> all_one_;
  std::unique_ptr<int64_t[]> ids_;
  // Used instead of `ids_` if the ids were converted to rows while they were
  // read.
  std::shared_ptr<uint32_t[]> rows_;
  std::shared_ptr<int64_t[]> splits_;  // Row splits of each feature.
  std::unique_ptr<float[]> weights_;
};

// Creates views of the features of a packed batch, without unpacking it.
// Returns false if the ids must be unpacked: if the batch is invalid or has
// weights or sequences, or if samples have different numbers of ids of a
// feature. `owner` keeps the memory of the batch alive.
bool ViewPackedIds(const std::vector<FeatureSpec>& specs,
                   const PackedInput& input,
                   const std::shared_ptr<const void>& owner,
                   const ParallelFor& parallel_for,
                   std::vector<RaggedIds>* features);

// Builds a packed batch from features with optional weights.
class IdPacker {
 public:
  // Returns an error if the features have different numbers of samples, or if
  // `RaggedIds::Make` would reject their splits or weights. `names` are the
  // feature names in error messages.
  static Status Make(const std::vector<std::string>& names,
                     const std::vector<FeatureInput<int64_t>>& features,
                     IdPacker* packer);

  int64_t num_samples() const { return num_samples_; }
  // Returns the minimum number of columns, which the longest sample requires.
  int64_t num_columns() const { return num_columns_; }

  // Writes the matrix of ids and the matrix of weights. Each matrix must have
  // one row per sample and at least `num_columns()` columns. The padding is set
  // to 0. If `weights` has no data, only the ids are written. Otherwise, the
  // ids of features without weights get the weight 1.
  void Write(int64_t mark, MatrixView<int64_t> ids,
             MatrixView<float> weights) const;

 private:
  std::vector<FeatureInput<int64_t>> features_;
  std::vector<std::vector<int64_t>> splits_;  // The row splits of each feature.
  int64_t num_samples_ = 0;
  int64_t num_columns_ = 0;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_IDS_PACKED_IDS_H_
