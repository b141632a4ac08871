// The checked ids of one feature in one batch. All checks of ids are in this
// file.

#ifndef TF_LAYOUTMAP_CORE_IDS_RAGGED_IDS_H_
#define TF_LAYOUTMAP_CORE_IDS_RAGGED_IDS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/combiner.h"

namespace layoutmap {

struct RowGroups;

// Handling of ids that are not rows of their table.
enum class OutOfRange {
  kError,
  kDrop,  // The id is ignored; its position in a sequence stays empty.
  kClip,  // The id becomes the nearest row.
};

Status ParseOutOfRange(const std::string& name, OutOfRange* out_of_range);

// The properties that a batch is checked against, and the names for messages.
struct FeatureSpec {
  std::string feature;
  std::string table;
  int64_t num_rows = 0;
  Combiner combiner = Combiner::kSum;
  // If above 0, the feature is a sequence. It has one output row for each of
  // the first `max_sequence_length` positions of a sample and does not combine
  // ids.
  int64_t max_sequence_length = 0;
  OutOfRange out_of_range = OutOfRange::kError;
  // Advice in the error message about an id outside the table; may be empty.
  std::string advice;
};

// Number of ids in a batch, and numbers of the ids that were removed or
// replaced.
struct IdCounts {
  int64_t num_ids = 0;        // all ids
  int64_t num_dropped = 0;    // out of range, removed
  int64_t num_clipped = 0;    // out of range, replaced
  int64_t num_truncated = 0;  // after the last position of a sequence
};

// The representation that assigns ids to samples in `splits`.
enum class Form {
  kRagged,  // row_splits, [num_samples + 1]
  // Indices, [num_ids, 2] row-major: the sample, and the position in the
  // sample, which only sequences use.
  kSparse,
  kDense,  // unused: every sample has num_ids / num_samples ids
};

template <typename Tid>
struct FeatureInput {
  Form form = Form::kRagged;
  Span<const Tid> ids;
  Span<const int64_t> splits;
  int64_t num_samples = 0;
  Span<const float> weights;  // empty: all weights are 1
};

// Computes the checked row_splits of an input, [num_samples + 1].
template <typename Tid>
Status MakeSplits(const FeatureSpec& spec, const FeatureInput<Tid>& input,
                  std::vector<int64_t>* splits);

// Returns the description of an id in messages: "Feature 'ads', sample 3: id
// 105".
std::string NameOfId(const FeatureSpec& spec, int64_t sample, int64_t id);

class RaggedIds {
 public:
  // Checks `input` and copies the data that a step needs. `ids` stays unchanged
  // on error.
  template <typename Tid>
  static Status Make(const FeatureSpec& spec, const FeatureInput<Tid>& input,
                     RaggedIds* ids);

  // Creates ids of a non-sequence feature from checked rows without weights.
  // The spans are views of memory that `owner` keeps alive.
  static RaggedIds OfRows(const FeatureSpec& spec, Span<const uint32_t> rows,
                          Span<const int64_t> splits,
                          std::shared_ptr<const void> owner);

  // Like `Make`, for ids that are keys of an open vocabulary; every int64 is
  // allowed. The rows must then be set with `TakeRowsOfKeys`. For a sequence,
  // `rows()` are the indices of the used keys in `input`; other features use
  // all keys.
  static Status MakeOfKeys(const FeatureSpec& spec,
                           const FeatureInput<int64_t>& input, RaggedIds* ids);

  // Returns the number of activation rows: samples, multiplied by the sequence
  // length for sequences.
  int64_t num_outputs() const { return splits().size() - 1; }
  int64_t num_samples() const { return num_samples_; }

  // Validated global rows. Output `o` has the rows [splits[o], splits[o + 1]).
  Span<const uint32_t> rows() const {
    return owner_ == nullptr ? Span<const uint32_t>(rows_) : shared_rows_;
  }
  Span<const int64_t> splits() const {
    return owner_ == nullptr ? Span<const int64_t>(splits_) : shared_splits_;
  }
  // One factor per row; empty if all factors are 1.
  Span<const float> gains() const { return gains_; }
  const IdCounts& counts() const { return counts_; }

  // Replaces `rows()[i]`, the index of a key, by rows[i]. If rows[i] is
  // negative, the id gets `unknown_row`. If `unknown_row` is negative, too, the
  // id is removed with its gain, and its position in a sequence stays empty.
  // `step` is the step of the vocabulary that used the keys, or 0. `groups` may
  // hold the unique rows of all batches of the table in that step.
  void TakeRowsOfKeys(Span<const int64_t> rows, int64_t unknown_row,
                      int32_t step,
                      std::shared_ptr<const RowGroups> groups = nullptr);
  int32_t vocabulary_step() const { return vocabulary_step_; }
  const std::shared_ptr<const RowGroups>& groups() const { return groups_; }

 private:
  // Computes splits and gains for `rows_`, which holds one row per id.
  template <typename Tid>
  Status Arrange(const FeatureSpec& spec, const FeatureInput<Tid>& input,
                 const std::vector<bool>& dropped);

  int64_t num_samples_ = 0;
  std::vector<uint32_t> rows_;
  std::vector<int64_t> splits_{0};
  // Used instead of `rows_` and `splits_` if `OfRows` created the object.
  std::shared_ptr<const void> owner_;
  Span<const uint32_t> shared_rows_;
  Span<const int64_t> shared_splits_;
  std::vector<float> gains_;
  IdCounts counts_;
  int32_t vocabulary_step_ = 0;
  std::shared_ptr<const RowGroups> groups_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_IDS_RAGGED_IDS_H_
