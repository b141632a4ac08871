// The ids of one feature in one batch: the one place where they are checked.

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

// What becomes of an id that is not a row of its table.
enum class OutOfRange {
  kError,
  kDrop,  // as if it were not there; its position of a sequence stays empty
  kClip,  // the nearest row
};

Status ParseOutOfRange(const std::string& name, OutOfRange* out_of_range);

// What a batch must agree with, and the names that messages use.
struct FeatureSpec {
  std::string feature;
  std::string table;
  int64_t num_rows = 0;
  Combiner combiner = Combiner::kSum;
  // Above 0: a sequence feature. It has one output row for each of the first
  // positions of a sample, and combines nothing.
  int64_t max_sequence_length = 0;
  OutOfRange out_of_range = OutOfRange::kError;
  // What the error about an id outside the table advises; may be empty.
  std::string advice;
};

// How many ids of a batch were not used as they came.
struct IdCounts {
  int64_t num_ids = 0;        // that came
  int64_t num_dropped = 0;    // out of range
  int64_t num_clipped = 0;    // out of range
  int64_t num_truncated = 0;  // behind the last position of a sequence
};

// How `splits` says which sample an id belongs to.
enum class Form {
  kRagged,  // row_splits, [num_samples + 1]
  kSparse,  // indices, [num_ids, 2] row-major: the sample, and the position
            // in it, which a sequence keeps
  kDense,   // unused: every sample has num_ids / num_samples ids
};

template <typename Tid>
struct FeatureInput {
  Form form = Form::kRagged;
  Span<const Tid> ids;
  Span<const int64_t> splits;
  int64_t num_samples = 0;
  Span<const float> weights;  // empty: 1 each
};

// The checked row_splits of an input, [num_samples + 1].
template <typename Tid>
Status MakeSplits(const FeatureSpec& spec, const FeatureInput<Tid>& input,
                  std::vector<int64_t>* splits);

// What messages call an id of a feature: "Feature 'ads', sample 3: id 105".
std::string NameOfId(const FeatureSpec& spec, int64_t sample, int64_t id);

class RaggedIds {
 public:
  // Checks `input` and keeps a copy of what a step needs. Nothing of `ids`
  // changes unless the result is ok.
  template <typename Tid>
  static Status Make(const FeatureSpec& spec, const FeatureInput<Tid>& input,
                     RaggedIds* ids);

  // Of rows that are checked already, without weights, of a feature that is no
  // sequence: views of memory that `owner` keeps.
  static RaggedIds OfRows(const FeatureSpec& spec, Span<const uint32_t> rows,
                          Span<const int64_t> splits,
                          std::shared_ptr<const void> owner);

  // The same as `Make` of ids that are keys, which any int64 may be. `rows()`
  // are then the places of the keys in use among those of `input`, if `spec` is
  // of a sequence; else all are, and their rows are to come.
  static Status MakeOfKeys(const FeatureSpec& spec,
                           const FeatureInput<int64_t>& input, RaggedIds* ids);

  // Rows of the activations: samples, times the sequence length if there is
  // one.
  int64_t num_outputs() const { return splits().size() - 1; }
  int64_t num_samples() const { return num_samples_; }

  // Validated global rows, those of output `o` at [splits[o], splits[o + 1]).
  Span<const uint32_t> rows() const {
    return owner_ == nullptr ? Span<const uint32_t>(rows_) : shared_rows_;
  }
  Span<const int64_t> splits() const {
    return owner_ == nullptr ? Span<const int64_t>(splits_) : shared_splits_;
  }
  // One factor per row; empty when all are 1.
  Span<const float> gains() const { return gains_; }
  const IdCounts& counts() const { return counts_; }

  // Of ids that are keys: puts rows[i] in the place of `rows()[i]`. Where it is
  // negative the id gets `unknown_row`; if that is negative, too, it goes with
  // its gain, and its position of a sequence stays empty. `step` is the
  // vocabulary's step that used them, 0 if none did; `groups`, if there are
  // any, are those of all batches of the table in that step.
  void TakeRowsOfKeys(Span<const int64_t> rows, int64_t unknown_row,
                      int32_t step,
                      std::shared_ptr<const RowGroups> groups = nullptr);
  int32_t vocabulary_step() const { return vocabulary_step_; }
  const std::shared_ptr<const RowGroups>& groups() const { return groups_; }

 private:
  // The samples, positions and gains of `rows_`, one for each id so far.
  template <typename Tid>
  Status Arrange(const FeatureSpec& spec, const FeatureInput<Tid>& input,
                 const std::vector<bool>& dropped);

  int64_t num_samples_ = 0;
  std::vector<uint32_t> rows_;
  std::vector<int64_t> splits_{0};
  // Instead of these two, where `OfRows` made it.
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
