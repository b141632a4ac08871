// Functions with which shape functions access inputs and outputs by name. Shape
// functions therefore do not depend on the order of the inputs and outputs in
// the op definition.

#ifndef TF_LAYOUTMAP_OPS_PORTS_H_
#define TF_LAYOUTMAP_OPS_PORTS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace layoutmap {

// Gets the shape of the input `name`. If the input is a list, gets the shape of
// its first tensor.
inline absl::Status GetShape(tensorflow::shape_inference::InferenceContext* c,
                             const char* name,
                             tensorflow::shape_inference::ShapeHandle* shape) {
  std::vector<tensorflow::shape_inference::ShapeHandle> shapes;
  absl::Status status = c->input(name, &shapes);
  if (status.ok()) *shape = shapes[0];
  return status;
}

// Gets the shape of the input `name`. Returns an error if the shape cannot have
// the rank `rank`.
inline absl::Status GetShape(tensorflow::shape_inference::InferenceContext* c,
                             const char* name, int rank,
                             tensorflow::shape_inference::ShapeHandle* shape) {
  absl::Status status = GetShape(c, name, shape);
  return status.ok() ? c->WithRank(*shape, rank, shape) : status;
}

inline absl::Status SetShape(tensorflow::shape_inference::InferenceContext* c,
                             const char* name,
                             tensorflow::shape_inference::ShapeHandle shape) {
  return c->set_output(name, {shape});
}

// Sets the shapes of the output list `name` to vectors of unknown size. The
// attribute `count` is the length of the list.
inline absl::Status SetVectors(tensorflow::shape_inference::InferenceContext* c,
                               const char* name, const char* count) {
  using tensorflow::shape_inference::InferenceContext;
  int32_t size;
  TF_RETURN_IF_ERROR(c->GetAttr(count, &size));
  return c->set_output(name,
                       std::vector<tensorflow::shape_inference::ShapeHandle>(
                           size, c->Vector(InferenceContext::kUnknownDim)));
}

// Sets the shapes of the output list `activations`. The shape of a feature is
// [num_samples, dim], or [num_samples, length, dim] if the feature is a
// sequence.
inline absl::Status SetActivationShapes(
    tensorflow::shape_inference::InferenceContext* c,
    const std::vector<int64_t>& dims, const std::vector<int64_t>& lengths) {
  using tensorflow::shape_inference::InferenceContext;
  std::vector<tensorflow::shape_inference::ShapeHandle> activations;
  for (size_t f = 0; f < static_cast<size_t>(c->num_outputs()); ++f) {
    if (f >= dims.size() || f >= lengths.size()) {
      return absl::InvalidArgumentError(
          "`dims` and `max_sequence_lengths` must have one value per feature");
    }
    auto shape = c->Vector(InferenceContext::kUnknownDim);
    if (lengths[f] > 0) {
      TF_RETURN_IF_ERROR(c->Concatenate(shape, c->Vector(lengths[f]), &shape));
    }
    TF_RETURN_IF_ERROR(c->Concatenate(shape, c->Vector(dims[f]), &shape));
    activations.push_back(shape);
  }
  return c->set_output("activations", activations);
}

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_OPS_PORTS_H_
