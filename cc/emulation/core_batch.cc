#include "cc/emulation/core_batch.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cc/core/base/status.h"
#include "cc/core/base/views.h"
#include "cc/core/ids/check_ids.h"
#include "cc/core/ids/combiner.h"
#include "cc/core/ids/ragged_ids.h"
#include "cc/emulation/config/tpu_config.h"

namespace layoutmap {
namespace {

using std::to_string;

std::string ShapeString(const std::vector<int64_t>& sizes) {
  std::string text;
  for (const int64_t size : sizes) {
    text += (text.empty() ? "[" : ", ") + to_string(size);
  }
  return text + "]";
}

// Converts the indices of a SparseTensor to activation rows.
class SparseLocations {
 public:
  SparseLocations(const std::string& feature, const std::vector<int64_t>& shape,
                  Span<const int64_t> indices, int64_t num_columns)
      : feature_(feature),
        shape_(shape),
        indices_(indices),
        num_columns_(num_columns),
        // If the activations have two axes, the indices may omit the column
        // along which ids are combined.
        num_axes_(num_columns == 2 && shape.size() == 2 ? 2 : num_columns - 1) {
  }

  Status CheckColumns() const {
    if (num_axes_ == static_cast<int64_t>(shape_.size())) return Status();
    return InvalidArgument(
        "Feature '" + feature_ + "': its activations have the shape " +
        ShapeString(shape_) +
        ", so the indices of a SparseTensor must have one column for each of "
        "these axes and one additional column. Received: " +
        to_string(num_columns_) + " columns");
  }

  // Sets `output` to the activation row of id i, or to -1 if the id is after
  // the maximum length of a sequence.
  Status FindOutput(int64_t i, int64_t* output) const {
    *output = 0;
    bool is_cut_off = false;
    for (int64_t axis = 0; axis < num_axes_; ++axis) {
      const int64_t index = indices_[i * num_columns_ + axis];
      if (index < 0 || (axis == 0 && index >= shape_[0])) {
        return InvalidArgument(
            "Feature '" + feature_ +
            "': the indices of a SparseTensor must be within its " +
            to_string(shape_[0]) + " samples. Received: " + to_string(index) +
            " (axis " + to_string(axis) + ", id number " + to_string(i) + ")");
      }
      is_cut_off |= index >= shape_[axis];
      *output = *output * shape_[axis] + index;
    }
    if (is_cut_off) *output = -1;
    return Status();
  }

 private:
  const std::string& feature_;
  const std::vector<int64_t>& shape_;
  const Span<const int64_t> indices_;
  const int64_t num_columns_;
  const int64_t num_axes_;
};

template <typename Tid>
Status MakeSparse(const TpuConfig& config, size_t f, const FeatureSpec& spec,
                  const CoreInput<Tid>& input, RaggedIds* made) {
  const int64_t num_ids = input.ids.size();
  const std::string& name = spec.feature;
  if (input.locations.size() != num_ids * input.num_columns) {
    return InvalidArgument(
        "Feature '" + name +
        "': a SparseTensor must have one index per id. Received: " +
        to_string(input.locations.size() / input.num_columns) + " indices, " +
        to_string(num_ids) + " ids");
  }
  if (!input.weights.empty() && input.weights.size() != num_ids) {
    return InvalidArgument("Feature '" + name +
                           "': weights must have one value per id. Received: " +
                           to_string(input.weights.size()) + " weights, " +
                           to_string(num_ids) + " ids");
  }
  const SparseLocations locations(name, config.output_shapes[f],
                                  input.locations, input.num_columns);
  LM_RETURN_IF_ERROR(locations.CheckColumns());
  std::vector<int64_t> sample_of(num_ids);
  std::vector<int64_t> splits(config.num_outputs(f) + 1);
  std::vector<Tid> ids;
  std::vector<float> weights;
  int64_t previous = 0;
  for (int64_t i = 0; i < num_ids; ++i) {
    int64_t output;
    LM_RETURN_IF_ERROR(locations.FindOutput(i, &output));
    sample_of[i] = input.locations[i * input.num_columns];
    if (output < 0) continue;
    if (output < previous) {
      return InvalidArgument(
          "Feature '" + name +
          "': the indices of a SparseTensor must be in order; call "
          "tf.sparse.reorder. Received: sample " +
          to_string(sample_of[i]) + " after a later index (id number " +
          to_string(i) + ")");
    }
    previous = output;
    ++splits[output + 1];
    ids.push_back(input.ids[i]);
    if (!input.weights.empty()) weights.push_back(input.weights[i]);
  }
  // The ids are checked here, because the error message names the sample. The
  // samples of truncated ids are not known later.
  LM_RETURN_IF_ERROR(CheckNamedIds(
      input.ids, spec.num_rows, spec.table,
      [&](int64_t i) { return NameOfId(spec, sample_of[i], input.ids[i]); }));
  for (size_t o = 1; o < splits.size(); ++o) splits[o] += splits[o - 1];
  FeatureInput<Tid> ragged;
  ragged.ids = ids;
  ragged.splits = splits;
  ragged.num_samples = config.num_outputs(f);
  ragged.weights = weights;
  return RaggedIds::Make(spec, ragged, made);
}

template <typename Tid>
Status MakeRagged(const TpuConfig& config, size_t f, FeatureSpec spec,
                  const CoreInput<Tid>& input, RaggedIds* made) {
  const std::vector<int64_t>& shape = config.output_shapes[f];
  FeatureInput<Tid> ragged;
  ragged.ids = input.ids;
  ragged.splits = input.locations;
  ragged.weights = input.weights;
  ragged.num_samples = input.locations.size() - 1;
  if (shape.size() > 1 && ragged.num_samples == shape[0]) {
    spec.max_sequence_length = config.outputs_per_sample(f);
  } else if (ragged.num_samples != config.num_outputs(f)) {
    return InvalidArgument(
        "Feature '" + spec.feature + "': its activations have the shape " +
        ShapeString(shape) + ", so a RaggedTensor must have " +
        to_string(shape[0]) + " rows" +
        (shape.size() > 1 ? ", or " + to_string(config.num_outputs(f)) : "") +
        ". Received: " + to_string(ragged.num_samples));
  }
  return RaggedIds::Make(spec, ragged, made);
}

template <typename Tid>
Status MakeDense(const TpuConfig& config, size_t f, const FeatureSpec& spec,
                 const CoreInput<Tid>& input, RaggedIds* made) {
  const int64_t num_outputs = config.num_outputs(f);
  if (input.ids.size() != num_outputs) {
    return InvalidArgument(
        "Feature '" + spec.feature + "': its activations have the shape " +
        ShapeString(config.output_shapes[f]) +
        ", so the number of dense ids must be " + to_string(num_outputs) +
        ". Received: " + to_string(input.ids.size()));
  }
  if (!input.weights.empty()) {
    return InvalidArgument(
        "Feature '" + spec.feature +
        "': weights are not supported for dense ids. Received: " +
        to_string(input.weights.size()) + " weights");
  }
  FeatureInput<Tid> dense;
  dense.form = Form::kDense;
  dense.ids = input.ids;
  dense.num_samples = num_outputs;
  return RaggedIds::Make(spec, dense, made);
}

}  // namespace

template <typename Tid>
Status MakeCoreIds(const TpuConfig& config, size_t f, Combiner combiner,
                   const CoreInput<Tid>& input, RaggedIds* ids) {
  FeatureSpec spec = config.engine.features[f];
  spec.combiner = combiner;
  if (input.num_columns > 0) return MakeSparse(config, f, spec, input, ids);
  if (input.locations.empty()) return MakeDense(config, f, spec, input, ids);
  return MakeRagged(config, f, std::move(spec), input, ids);
}

template Status MakeCoreIds<int32_t>(const TpuConfig&, size_t, Combiner,
                                     const CoreInput<int32_t>&, RaggedIds*);
template Status MakeCoreIds<int64_t>(const TpuConfig&, size_t, Combiner,
                                     const CoreInput<int64_t>&, RaggedIds*);

}  // namespace layoutmap
