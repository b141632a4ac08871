// Ops that compute interactions of features. docs/ops.md documents the ops.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "cc/ops/ports.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace layoutmap {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Gets the merged shape of the input list `features`.
absl::Status GetFeatureShape(InferenceContext* c, ShapeHandle* shape) {
  std::vector<ShapeHandle> features;
  TF_RETURN_IF_ERROR(c->input("features", &features));
  TF_RETURN_IF_ERROR(c->WithRank(features[0], 2, shape));
  for (const ShapeHandle& feature : features) {
    TF_RETURN_IF_ERROR(c->Merge(*shape, feature, shape));
  }
  return absl::OkStatus();
}

// Gets the shape of the products, whose first dimension is the first dimension
// of `features`.
absl::Status GetProductShape(InferenceContext* c, ShapeHandle features,
                             ShapeHandle* shape) {
  int64_t num_features;
  bool self_interaction, skip_gather;
  TF_RETURN_IF_ERROR(c->GetAttr("num_features", &num_features));
  TF_RETURN_IF_ERROR(c->GetAttr("self_interaction", &self_interaction));
  TF_RETURN_IF_ERROR(c->GetAttr("skip_gather", &skip_gather));
  const int64_t num_products =
      skip_gather
          ? num_features * num_features
          : num_features * (num_features - 1 + 2 * self_interaction) / 2;
  *shape = c->Matrix(c->Dim(features, 0), num_products);
  return absl::OkStatus();
}

REGISTER_OP("LayoutMap>DotInteraction")
    .Input("features: num_features * float")
    .Output("products: float")
    .Attr("num_features: int >= 1")
    .Attr("self_interaction: bool = false")
    .Attr("skip_gather: bool = false")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle features, products;
      TF_RETURN_IF_ERROR(GetFeatureShape(c, &features));
      TF_RETURN_IF_ERROR(GetProductShape(c, features, &products));
      return SetShape(c, "products", products);
    })
    .Doc(R"doc(
Computes the dot products of all pairs of features of each sample.

features: Matrices of equal shapes, [num_samples, dim].
products: [num_samples, num_products]: the lower triangle of the matrix of
  products, row by row. With `skip_gather`, the full matrix, with zeros above
  the triangle.
self_interaction: Whether the triangle contains the diagonal.
skip_gather: Whether the output is the full matrix.
)doc");

REGISTER_OP("LayoutMap>DotInteractionGrad")
    .Input("features: num_features * float")
    .Input("gradients: float")
    .Output("feature_gradients: num_features * float")
    .Attr("num_features: int >= 1")
    .Attr("self_interaction: bool = false")
    .Attr("skip_gather: bool = false")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle features, products, gradients;
      TF_RETURN_IF_ERROR(GetFeatureShape(c, &features));
      TF_RETURN_IF_ERROR(GetProductShape(c, features, &products));
      TF_RETURN_IF_ERROR(GetShape(c, "gradients", 2, &gradients));
      TF_RETURN_IF_ERROR(c->Merge(products, gradients, &products));
      int64_t num_features;
      TF_RETURN_IF_ERROR(c->GetAttr("num_features", &num_features));
      return c->set_output("feature_gradients",
                           std::vector<ShapeHandle>(
                               static_cast<size_t>(num_features), features));
    })
    .Doc(R"doc(
Computes the gradients of the features of `DotInteraction`.

features: The input of `DotInteraction`.
gradients: Gradients of `products`; values above the triangle are ignored.
feature_gradients: The gradient of each feature, [num_samples, dim].
self_interaction: As for `DotInteraction`.
skip_gather: As for `DotInteraction`.
)doc");

}  // namespace
}  // namespace layoutmap
