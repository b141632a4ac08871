#include "cc/core/ids/ragged_ids.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/check_ids.h"
#include "cc/core/ids/combiner.h"
#include "cc/core/ids/row_groups.h"

namespace layoutmap {
namespace {

using std::to_string;

// The code that finds unique rows stores positions and rows as 32-bit integers.
constexpr int64_t kMaxNumIds = INT32_MAX;
constexpr int64_t kMaxNumRows = int64_t{1} << 32;

Status CheckRowSplits(const FeatureSpec& spec, Span<const int64_t> splits,
                      int64_t num_samples, int64_t num_ids) {
  const std::string where = "Feature '" + spec.feature + "': row_splits must ";
  if (splits.size() != num_samples + 1) {
    return InvalidArgument(where + "have num_samples + 1 values. Received: " +
                           to_string(splits.size()) + " values, " +
                           to_string(num_samples) + " samples");
  }
  if (splits[0] != 0) {
    return InvalidArgument(where +
                           "start with 0. Received: " + to_string(splits[0]));
  }
  for (int64_t s = 0; s < num_samples; ++s) {
    if (splits[s + 1] < splits[s]) {
      return InvalidArgument(where +
                             "not decrease. Received: " + to_string(splits[s]) +
                             ", then " + to_string(splits[s + 1]) +
                             " (sample " + to_string(s) + ")");
    }
  }
  if (splits[num_samples] != num_ids) {
    return InvalidArgument(where + "end with the number of ids. Received: " +
                           to_string(splits[num_samples]) + ", with " +
                           to_string(num_ids) + " ids");
  }
  return Status();
}

// Returns whether `splits` would pass `CheckRowSplits`. The loop combines sign
// bits, so that the compiler can vectorize it.
bool AreRowSplits(Span<const int64_t> splits, int64_t num_samples,
                  int64_t num_ids) {
  if (num_samples < 0 || splits.size() != num_samples + 1 || splits[0] != 0 ||
      splits[num_samples] != num_ids) {
    return false;
  }
  // Splits outside [0, num_ids] could overflow the differences.
  uint64_t signs = 0;
  for (int64_t s = 0; s < num_samples; ++s) {
    const auto split = static_cast<uint64_t>(splits[s]);
    const auto next = static_cast<uint64_t>(splits[s + 1]);
    signs |= next | (static_cast<uint64_t>(num_ids) - next) | (next - split);
  }
  return signs >> 63 == 0;
}

Status SplitsOfIndices(const FeatureSpec& spec, Span<const int64_t> indices,
                       int64_t num_samples, std::vector<int64_t>* splits) {
  const std::string where = "Feature '" + spec.feature + "': the indices of a ";
  const int64_t num_ids = indices.size() / 2;
  splits->assign(num_samples + 1, 0);
  int64_t previous = 0;
  for (int64_t i = 0; i < num_ids; ++i) {
    const int64_t sample = indices[2 * i];
    if (sample < 0 || sample >= num_samples) {
      return InvalidArgument(where + "SparseTensor must be inside its " +
                             to_string(num_samples) +
                             " samples. Received: sample " + to_string(sample) +
                             " (id number " + to_string(i) + ")");
    }
    if (sample < previous) {
      return InvalidArgument(where +
                             "SparseTensor must be ordered by sample; "
                             "use tf.sparse.reorder. Received: sample " +
                             to_string(sample) + " after " +
                             to_string(previous) + " (id number " +
                             to_string(i) + ")");
    }
    previous = sample;
    ++(*splits)[sample + 1];
  }
  for (int64_t s = 0; s < num_samples; ++s) (*splits)[s + 1] += (*splits)[s];
  return Status();
}

// Checks that the positions of a sequence are strictly ascending within each
// sample, because each position has at most one id.
Status CheckPositions(const FeatureSpec& spec, Span<const int64_t> indices,
                      Span<const int64_t> splits) {
  for (int64_t s = 0; s + 1 < splits.size(); ++s) {
    int64_t previous = -1;
    for (int64_t i = splits[s]; i < splits[s + 1]; ++i) {
      const int64_t position = indices[2 * i + 1];
      if (position <= previous) {
        return InvalidArgument(
            "Feature '" + spec.feature + "', sample " + to_string(s) +
            ": the positions of a sequence in a SparseTensor must be at least "
            "0 and ascend; use tf.sparse.reorder. Received: position " +
            to_string(position) +
            (previous < 0 ? "" : " after " + to_string(previous)) +
            " (id number " + to_string(i) + ")");
      }
      previous = position;
    }
  }
  return Status();
}

}  // namespace

template <typename Tid>
Status MakeSplits(const FeatureSpec& spec, const FeatureInput<Tid>& input,
                  std::vector<int64_t>* splits) {
  const int64_t num_ids = input.ids.size();
  const int64_t num_samples = input.num_samples;
  if (num_samples < 0 || num_samples > kMaxNumIds || num_ids > kMaxNumIds) {
    return InvalidArgument("Feature '" + spec.feature +
                           "': a batch must have at most 2^31 - 1 ids and 0 to "
                           "2^31 - 1 samples. Received: " +
                           to_string(num_ids) + " ids, " +
                           to_string(num_samples) + " samples");
  }
  const int64_t length = std::max<int64_t>(spec.max_sequence_length, 1);
  if (num_samples > kMaxNumIds / length) {
    return InvalidArgument(
        "Feature '" + spec.feature +
        "': a batch must have at most 2^31 - 1 activation rows. Received: " +
        to_string(num_samples) + " samples of max_sequence_length " +
        to_string(length));
  }
  switch (input.form) {
    case Form::kRagged:
      LM_RETURN_IF_ERROR(
          CheckRowSplits(spec, input.splits, num_samples, num_ids));
      splits->assign(input.splits.begin(), input.splits.end());
      return Status();
    case Form::kSparse:
      if (input.splits.size() != 2 * num_ids) {
        return InvalidArgument(
            "Feature '" + spec.feature +
            "': the indices of a SparseTensor must be [num_ids, 2]. "
            "Received: " +
            to_string(input.splits.size() / 2) + " indices, " +
            to_string(num_ids) + " ids");
      }
      LM_RETURN_IF_ERROR(
          SplitsOfIndices(spec, input.splits, num_samples, splits));
      if (spec.max_sequence_length > 0) {
        return CheckPositions(spec, input.splits, *splits);
      }
      return Status();
    case Form::kDense:
      break;
  }
  const int64_t per_sample = num_samples > 0 ? num_ids / num_samples : 0;
  if (per_sample * num_samples != num_ids) {
    return InvalidArgument(
        "Feature '" + spec.feature +
        "': dense ids must have the same number of ids for each sample. "
        "Received: " +
        to_string(num_ids) + " ids, " + to_string(num_samples) + " samples");
  }
  splits->resize(num_samples + 1);
  for (int64_t s = 0; s <= num_samples; ++s) (*splits)[s] = s * per_sample;
  return Status();
}

namespace {

int64_t SampleOf(Span<const int64_t> splits, int64_t i) {
  return std::upper_bound(splits.begin(), splits.end(), i) - splits.begin() - 1;
}

// Converts ids to rows. If any id is out of range, a second loop clips the
// out-of-range ids, marks them in `dropped` (one flag per id), or finds the
// first of them for the error message.
template <typename Tid>
Status MakeRows(const FeatureSpec& spec, Span<const Tid> ids,
                Span<const int64_t> splits, std::vector<uint32_t>* rows,
                std::vector<bool>* dropped, IdCounts* counts) {
  const int64_t num_rows = spec.num_rows;
  rows->resize(ids.size());
  uint32_t* out = rows->data();
  for (int64_t i = 0; i < ids.size(); ++i) {
    out[i] = static_cast<uint32_t>(ids[i]);
  }
  if (!AnyOutside(ids, num_rows)) return Status();
  if (spec.out_of_range == OutOfRange::kClip && spec.num_rows > 0) {
    for (int64_t i = 0; i < ids.size(); ++i) {
      if (!IsOutside(ids[i], num_rows)) continue;
      out[i] = ids[i] < 0 ? 0 : static_cast<uint32_t>(num_rows - 1);
      ++counts->num_clipped;
    }
    return Status();
  }
  if (spec.out_of_range == OutOfRange::kDrop) {
    dropped->resize(ids.size());
    for (int64_t i = 0; i < ids.size(); ++i) {
      (*dropped)[i] = IsOutside(ids[i], num_rows);
      counts->num_dropped += (*dropped)[i];
    }
    return Status();
  }
  const Status status = CheckNamedIds(
      ids, num_rows, spec.table,
      [&](int64_t i) { return NameOfId(spec, SampleOf(splits, i), ids[i]); });
  return spec.advice.empty() ? status
                             : InvalidArgument(status.message() + spec.advice);
}

Status CheckWeights(const FeatureSpec& spec, Span<const float> weights,
                    Span<const int64_t> splits, int64_t num_ids) {
  if (weights.empty()) return Status();
  const std::string feature = "Feature '" + spec.feature + "'";
  if (spec.max_sequence_length > 0) {
    return InvalidArgument(feature +
                           ": a sequence feature takes no weights. Received: " +
                           to_string(weights.size()) + " weights");
  }
  if (weights.size() != num_ids) {
    return InvalidArgument(
        feature + ": weights must be one per id. Received: " +
        to_string(weights.size()) + " weights, " + to_string(num_ids) + " ids");
  }
  for (int64_t i = 0; i < num_ids; ++i) {
    if (!std::isfinite(weights[i])) {
      return InvalidArgument(
          feature + ", sample " + to_string(SampleOf(splits, i)) +
          ": a weight must be finite. Received: " + to_string(weights[i]));
    }
  }
  return Status();
}

// Removes the ids whose flag in `dropped` is true from their samples.
void Compact(const std::vector<bool>& dropped, std::vector<uint32_t>* rows,
             std::vector<int64_t>* splits, std::vector<float>* weights) {
  int64_t kept = 0, start = 0;
  for (size_t s = 1; s < splits->size(); ++s) {
    const int64_t end = (*splits)[s];
    for (int64_t i = start; i < end; ++i) {
      if (dropped[i]) continue;
      if (!weights->empty()) (*weights)[kept] = (*weights)[i];
      (*rows)[kept++] = (*rows)[i];
    }
    start = end;
    (*splits)[s] = kept;
  }
  rows->resize(kept);
  if (!weights->empty()) weights->resize(kept);
}

// Creates one output row, with at most one id, for each position of a sequence.
// `indices` are the checked indices of a SparseTensor and contain the
// positions. If `indices` is empty, the ids of a sample have consecutive
// positions.
void SpreadSequences(int64_t length, Span<const int64_t> indices,
                     const std::vector<bool>& dropped,
                     std::vector<uint32_t>* rows, std::vector<int64_t>* splits,
                     IdCounts* counts) {
  const int64_t num_samples = static_cast<int64_t>(splits->size()) - 1;
  std::vector<int64_t> spread;
  spread.reserve(num_samples * length + 1);
  spread.push_back(0);
  int64_t kept = 0;
  for (int64_t s = 0; s < num_samples; ++s) {
    const int64_t start = (*splits)[s], end = (*splits)[s + 1];
    int64_t i = start;
    for (int64_t p = 0; p < length; ++p) {
      if (i < end && p == (indices.empty() ? i - start : indices[2 * i + 1])) {
        if (dropped.empty() || !dropped[i]) (*rows)[kept++] = (*rows)[i];
        ++i;
      }
      spread.push_back(kept);
    }
    counts->num_truncated += end - i;
  }
  rows->resize(kept);
  *splits = std::move(spread);
}

}  // namespace

std::string NameOfId(const FeatureSpec& spec, int64_t sample, int64_t id) {
  return "Feature '" + spec.feature + "', sample " + to_string(sample) +
         ": id " + to_string(id);
}

Status ParseOutOfRange(const std::string& name, OutOfRange* out_of_range) {
  if (name == "error") {
    *out_of_range = OutOfRange::kError;
  } else if (name == "drop") {
    *out_of_range = OutOfRange::kDrop;
  } else if (name == "clip") {
    *out_of_range = OutOfRange::kClip;
  } else {
    return InvalidArgument(
        "`out_of_range` must be one of error, drop, clip. Received: " + name);
  }
  return Status();
}

template <typename Tid>
Status RaggedIds::Arrange(const FeatureSpec& spec,
                          const FeatureInput<Tid>& input,
                          const std::vector<bool>& dropped) {
  LM_RETURN_IF_ERROR(
      CheckWeights(spec, input.weights, splits_, input.ids.size()));
  Span<const float> weights = input.weights;
  std::vector<float> kept_weights;
  if (spec.max_sequence_length > 0) {
    SpreadSequences(
        spec.max_sequence_length,
        input.form == Form::kSparse ? input.splits : Span<const int64_t>(),
        dropped, &rows_, &splits_, &counts_);
  } else if (!dropped.empty()) {
    kept_weights.assign(weights.begin(), weights.end());
    Compact(dropped, &rows_, &splits_, &kept_weights);
    weights = kept_weights;
  }
  if (spec.max_sequence_length == 0 &&
      (spec.combiner != Combiner::kSum || !input.weights.empty())) {
    gains_.resize(rows_.size());
    CombineGains(spec.combiner, splits_, weights, gains_);
  }
  return Status();
}

template <typename Tid>
Status RaggedIds::Make(const FeatureSpec& spec, const FeatureInput<Tid>& input,
                       RaggedIds* ids) {
  if (spec.num_rows < 0 || spec.num_rows > kMaxNumRows) {
    return InvalidArgument(
        "Feature '" + spec.feature + "': table '" + spec.table +
        "' must have 0 to 2^32 rows. Received: " + to_string(spec.num_rows));
  }
  RaggedIds made;
  made.num_samples_ = input.num_samples;
  LM_RETURN_IF_ERROR(MakeSplits(spec, input, &made.splits_));
  made.counts_.num_ids = input.ids.size();
  std::vector<bool> dropped;
  LM_RETURN_IF_ERROR(MakeRows(spec, input.ids, made.splits_, &made.rows_,
                              &dropped, &made.counts_));
  LM_RETURN_IF_ERROR(made.Arrange(spec, input, dropped));
  *ids = std::move(made);
  return Status();
}

template <typename Tid>
bool RaggedIds::MakeView(const FeatureSpec& spec,
                         const FeatureInput<Tid>& input,
                         const std::shared_ptr<const void>& owner,
                         RaggedIds* ids) {
  assert(owner != nullptr);
  if (spec.max_sequence_length > 0 || !input.weights.empty() ||
      input.form == Form::kSparse || spec.num_rows < 0 ||
      spec.num_rows > kMaxNumRows || input.ids.size() > kMaxNumIds ||
      input.num_samples > kMaxNumIds || AnyOutside(input.ids, spec.num_rows)) {
    return false;
  }
  RaggedIds made;
  if (input.form == Form::kRagged) {
    if (!AreRowSplits(input.splits, input.num_samples, input.ids.size())) {
      return false;
    }
    made.shared_splits_ = input.splits;
  } else if (!MakeSplits(spec, input, &made.splits_).ok()) {
    return false;
  }
  made.num_samples_ = input.num_samples;
  made.counts_.num_ids = input.ids.size();
  made.owner_ = owner;
  made.is_view_ = true;
  made.viewed_rows_ = input.ids;
  if (spec.combiner != Combiner::kSum) {
    made.gains_.resize(input.num_samples);
    CombineOutputGains(spec.combiner, made.splits(), made.gains_);
  }
  *ids = std::move(made);
  return true;
}

RaggedIds RaggedIds::EvenView(const FeatureSpec& spec, Span<const int64_t> ids,
                              const EvenIds& even, int64_t num_samples,
                              std::shared_ptr<const void> owner) {
  assert(spec.max_sequence_length == 0 && owner != nullptr);
  RaggedIds made;
  made.num_samples_ = num_samples;
  made.counts_.num_ids = num_samples * even.size;
  made.owner_ = std::move(owner);
  made.is_view_ = made.is_even_ = true;
  made.even_ = even;
  made.viewed_rows_ = ids;
  made.splits_.clear();
  if (spec.combiner != Combiner::kSum) {
    float gain;
    CombineOutputGains(spec.combiner, std::vector<int64_t>{0, even.size},
                       {&gain, 1});
    made.gains_.assign(num_samples, gain);
  }
  return made;
}

RaggedIds RaggedIds::OfRows(const FeatureSpec& spec, Span<const uint32_t> rows,
                            Span<const int64_t> splits,
                            std::shared_ptr<const void> owner) {
  assert(spec.max_sequence_length == 0 && owner != nullptr);
  RaggedIds made;
  made.num_samples_ = splits.size() - 1;
  made.counts_.num_ids = rows.size();
  made.owner_ = std::move(owner);
  made.shared_rows_ = rows;
  made.shared_splits_ = splits;
  if (spec.combiner != Combiner::kSum) {
    made.gains_.resize(rows.size());
    CombineGains(spec.combiner, splits, {}, made.gains_);
  }
  return made;
}

Status RaggedIds::MakeOfKeys(const FeatureSpec& spec,
                             const FeatureInput<int64_t>& input,
                             RaggedIds* ids) {
  RaggedIds made;
  made.num_samples_ = input.num_samples;
  LM_RETURN_IF_ERROR(MakeSplits(spec, input, &made.splits_));
  made.counts_.num_ids = input.ids.size();
  made.rows_.resize(input.ids.size());
  if (spec.max_sequence_length > 0) {
    std::iota(made.rows_.begin(), made.rows_.end(), 0);
  }
  LM_RETURN_IF_ERROR(made.Arrange(spec, input, {}));
  *ids = std::move(made);
  return Status();
}

void RaggedIds::TakeRowsOfKeys(Span<const int64_t> rows, int64_t unknown_row,
                               int32_t step,
                               std::shared_ptr<const RowGroups> groups) {
  assert(owner_ == nullptr);
  vocabulary_step_ = step;
  groups_ = std::move(groups);
  // The compiler can vectorize this loop. If every key of the batch has a row,
  // the code after the loop is not needed.
  int64_t signs = 0;
  for (int64_t i = 0; i < rows.size(); ++i) {
    rows_[i] = static_cast<uint32_t>(rows[i]);
    signs |= rows[i];
  }
  if (signs >= 0) return;
  if (unknown_row >= 0) {
    for (int64_t i = 0; i < rows.size(); ++i) {
      if (rows[i] < 0) rows_[i] = static_cast<uint32_t>(unknown_row);
    }
    return;
  }
  int64_t kept = 0, start = 0;
  for (size_t o = 1; o < splits_.size(); ++o) {
    const int64_t end = splits_[o];
    for (int64_t i = start; i < end; ++i) {
      if (rows[i] < 0) continue;
      if (!gains_.empty()) gains_[kept] = gains_[i];
      rows_[kept++] = static_cast<uint32_t>(rows[i]);
    }
    start = end;
    splits_[o] = kept;
  }
  rows_.resize(kept);
  if (!gains_.empty()) gains_.resize(kept);
}

template Status MakeSplits<int32_t>(const FeatureSpec&,
                                    const FeatureInput<int32_t>&,
                                    std::vector<int64_t>*);
template Status MakeSplits<int64_t>(const FeatureSpec&,
                                    const FeatureInput<int64_t>&,
                                    std::vector<int64_t>*);

template bool RaggedIds::MakeView<int32_t>(const FeatureSpec&,
                                           const FeatureInput<int32_t>&,
                                           const std::shared_ptr<const void>&,
                                           RaggedIds*);
template bool RaggedIds::MakeView<int64_t>(const FeatureSpec&,
                                           const FeatureInput<int64_t>&,
                                           const std::shared_ptr<const void>&,
                                           RaggedIds*);

template Status RaggedIds::Make<int32_t>(const FeatureSpec&,
                                         const FeatureInput<int32_t>&,
                                         RaggedIds*);
template Status RaggedIds::Make<int64_t>(const FeatureSpec&,
                                         const FeatureInput<int64_t>&,
                                         RaggedIds*);

}  // namespace layoutmap
