// The checked ids of one feature in one batch. All checks of ids are in this
// file.

#ifndef TF_LAYOUTMAP_CORE_IDS_RAGGED_IDS_H_
#define TF_LAYOUTMAP_CORE_IDS_RAGGED_IDS_H_

#include <cassert>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cc/core/base/row_ids.h"
#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/combiner.h"

namespace layoutmap {

struct RowGroups;

// How ids are handled that are not rows of their table.
enum class OutOfRange {
  kError,
  // The id is ignored. In a sequence, its position stays empty.
  kDrop,
  // The id is replaced by the nearest row.
  kClip,
};

Status ParseOutOfRange(const std::string& name, OutOfRange* out_of_range);

// The properties of a feature that a batch must match, and the names that error
// messages contain.
struct FeatureSpec {
  std::string feature;
  std::string table;
  int64_t num_rows = 0;
  Combiner combiner = Combiner::kSum;
  // If this value is above 0, the feature is a sequence. A sequence does not
  // combine ids. It has one output row for each of the first
  // `max_sequence_length` positions of a sample.
  int64_t max_sequence_length = 0;
  OutOfRange out_of_range = OutOfRange::kError;
  // Advice that is appended to the error message about an id outside the table,
  // or an empty string.
  std::string advice;
};

// Counts of the ids in a batch, and of the ids that were removed or replaced.
struct IdCounts {
  // Number of all ids.
  int64_t num_ids = 0;
  // Number of out-of-range ids that were removed.
  int64_t num_dropped = 0;
  // Number of out-of-range ids that were replaced by the nearest row.
  int64_t num_clipped = 0;
  // Number of ids after the last position of a sequence.
  int64_t num_truncated = 0;
};

// How `splits` assigns ids to samples.
enum class Form {
  // `splits` contains row_splits, [num_samples + 1].
  kRagged,
  // `splits` contains row-major indices, [num_ids, 2]. Each index has the
  // sample and the position in the sample. Only sequences use the position.
  kSparse,
  // `splits` is not used. Every sample has num_ids / num_samples ids.
  kDense,
};

template <typename Tid>
struct FeatureInput {
  Form form = Form::kRagged;
  Span<const Tid> ids;
  Span<const int64_t> splits;
  int64_t num_samples = 0;
  Span<const float> weights;  // If empty, all weights are 1.
};

// Computes the checked row_splits of an input, [num_samples + 1].
template <typename Tid>
Status MakeSplits(const FeatureSpec& spec, const FeatureInput<Tid>& input,
                  std::vector<int64_t>* splits);

// Returns the description of an id for error messages, such as "Feature 'ads',
// sample 3: id 105".
std::string NameOfId(const FeatureSpec& spec, int64_t sample, int64_t id);

class RaggedIds {
 public:
  // Checks `input` and copies the data that a step needs. If the check fails,
  // `ids` stays unchanged.
  template <typename Tid>
  static Status Make(const FeatureSpec& spec, const FeatureInput<Tid>& input,
                     RaggedIds* ids);

  // Checks `input` like `Make`, and refers to its ids and splits instead of
  // copying them. Only lookups can use the result. `owner` keeps the memory of
  // the ids and splits alive. This memory must not change. Returns false if
  // `input` is invalid or must be copied. The caller must then call `Make`.
  template <typename Tid>
  static bool MakeView(const FeatureSpec& spec, const FeatureInput<Tid>& input,
                       const std::shared_ptr<const void>& owner,
                       RaggedIds* ids);

  // Creates a view of checked ids of a feature whose outputs all have the same
  // number of ids. The feature must not be a sequence and must not have
  // weights. Only lookups can use the result.
  static RaggedIds EvenView(const FeatureSpec& spec, Span<const int64_t> ids,
                            const EvenIds& even, int64_t num_samples,
                            std::shared_ptr<const void> owner);

  // Creates ids from rows that the caller has checked. The feature must not be
  // a sequence and must not have weights. The spans are views of memory that
  // `owner` keeps alive.
  static RaggedIds OfRows(const FeatureSpec& spec, Span<const uint32_t> rows,
                          Span<const int64_t> splits,
                          std::shared_ptr<const void> owner);

  // Does the same as `Make` for ids that are keys of an open vocabulary. Every
  // int64 is a valid key here. The caller must then set the rows with
  // `TakeRowsOfKeys`. Until then, the `rows()` of a sequence are the indices in
  // `input` of the keys that the sequence uses. A feature that is not a
  // sequence uses all of its keys.
  static Status MakeOfKeys(const FeatureSpec& spec,
                           const FeatureInput<int64_t>& input, RaggedIds* ids);

  // Returns the number of activation rows: `max_sequence_length` per sample for
  // a sequence, and one per sample for other features.
  int64_t num_outputs() const {
    return is_even_ ? num_samples_ : splits().size() - 1;
  }
  int64_t num_samples() const { return num_samples_; }

  // Validated global rows. The rows of output `o` have the indices [splits[o],
  // splits[o + 1]). Objects that `MakeView` or `EvenView` created have only
  // `lookup_rows`.
  Span<const uint32_t> rows() const {
    assert(!is_view_);
    return owner_ == nullptr ? Span<const uint32_t>(rows_) : shared_rows_;
  }
  RowIds lookup_rows() const { return is_view_ ? viewed_rows_ : rows(); }
  // Empty for objects that `EvenView` created. `even()` contains their ranges.
  Span<const int64_t> splits() const {
    return shared_splits_.empty() ? Span<const int64_t>(splits_)
                                  : shared_splits_;
  }
  const EvenIds& even() const { return even_; }
  // One factor per row. Empty if all factors are 1, or if there is one factor
  // per output.
  Span<const float> gains() const {
    return is_view_ ? Span<const float>() : Span<const float>(gains_);
  }
  Span<const float> output_gains() const {
    return is_view_ ? Span<const float>(gains_) : Span<const float>();
  }
  const IdCounts& counts() const { return counts_; }

  // Replaces `rows()[i]`, the index of a key, by rows[i]. If rows[i] is
  // negative, the row becomes `unknown_row`. If `unknown_row` is also negative,
  // the id and its gain are removed, and its position in a sequence stays
  // empty. `step` is the number of the vocabulary step that used the keys, or
  // 0. If `groups` is not null, it contains the unique rows of all batches of
  // the table in that step.
  void TakeRowsOfKeys(Span<const int64_t> rows, int64_t unknown_row,
                      int32_t step,
                      std::shared_ptr<const RowGroups> groups = nullptr);
  int32_t vocabulary_step() const { return vocabulary_step_; }
  const std::shared_ptr<const RowGroups>& groups() const { return groups_; }

 private:
  // Computes the splits and the gains. At this point, `rows_` contains one row
  // per id.
  template <typename Tid>
  Status Arrange(const FeatureSpec& spec, const FeatureInput<Tid>& input,
                 const std::vector<bool>& dropped);

  int64_t num_samples_ = 0;
  std::vector<uint32_t> rows_;
  std::vector<int64_t> splits_{0};
  // If `OfRows` or a view function created the object, these members are used
  // instead of `rows_` and `splits_`.
  std::shared_ptr<const void> owner_;
  bool is_view_ = false;
  bool is_even_ = false;
  EvenIds even_;
  Span<const uint32_t> shared_rows_;
  RowIds viewed_rows_;
  Span<const int64_t> shared_splits_;
  std::vector<float> gains_;
  IdCounts counts_;
  int32_t vocabulary_step_ = 0;
  std::shared_ptr<const RowGroups> groups_;
};

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_CORE_IDS_RAGGED_IDS_H_
