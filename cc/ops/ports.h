// Inputs and outputs for shape functions, by the names that the op's own
// definition gives them, so that their order is said there alone.

#ifndef TF_LAYOUTMAP_OPS_PORTS_H_
#define TF_LAYOUTMAP_OPS_PORTS_H_

#include <vector>

#include "absl/status/status.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace layoutmap {

// The shape of the input `name`, of a list that of its first tensor.
inline absl::Status GetShape(tensorflow::shape_inference::InferenceContext* c,
                             const char* name,
                             tensorflow::shape_inference::ShapeHandle* shape) {
  std::vector<tensorflow::shape_inference::ShapeHandle> shapes;
  absl::Status status = c->input(name, &shapes);
  if (status.ok()) *shape = shapes[0];
  return status;
}

// The same, refused unless it may have this rank.
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

}  // namespace layoutmap

#endif  // TF_LAYOUTMAP_OPS_PORTS_H_
