// Ops that read the counts of keys, and that sample keys. docs/ops.md documents
// the ops.

#include "absl/status/status.h"
#include "cc/ops/ports.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace layoutmap {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("LayoutMap>CountKeys")
    .Input("lanes: num_lanes * resource")
    .Input("numbers: resource")
    .Input("offsets: int64")
    .Input("keys: int64")
    .Output("counts: int64")
    .Attr("num_lanes: int >= 3")
    .Attr("first_bucket: int = 0")
    .Attr("vocabulary_buckets: int")
    .Attr("half_life_steps: int = 0")
    .Attr("table: string = ''")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle keys;
      TF_RETURN_IF_ERROR(GetShape(c, "keys", &keys));
      return SetShape(c, "counts", keys);
    })
    .Doc(R"doc(
Reads the counts of keys in an open vocabulary.

lanes: All shards of the keys, of the last steps and of the counts.
numbers: Numbers of the vocabulary, which contain its step.
offsets: Cumulative numbers of buckets of the shards, [num_shards + 1].
keys: Any shape.
counts: Count of each key, decayed to the step of the vocabulary; 0 if the key
  has no row in the shards.
first_bucket: First bucket of the first shard.
vocabulary_buckets: Number of buckets of the full vocabulary.
half_life_steps: Number of steps after which the count of an unused key is
  halved; 0: never.
table: Name of the table, for error messages.
)doc");

REGISTER_OP("LayoutMap>SampleKeys")
    .Input("lanes: num_lanes * resource")
    .Input("numbers: resource")
    .Input("offsets: int64")
    .Input("num_sampled: int64")
    .Input("seed: int64")
    .Output("keys: int64")
    .Output("rows: int64")
    .Output("weights: int64")
    .Output("total: int64")
    .Attr("num_lanes: int >= 3")
    .Attr("by: {'uniform', 'count'}")
    .Attr("first_bucket: int = 0")
    .Attr("half_life_steps: int = 0")
    .Attr("table: string = ''")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(GetShape(c, "num_sampled", 0, &unused));
      TF_RETURN_IF_ERROR(GetShape(c, "seed", 1, &unused));
      // The outputs are empty if no key has a row.
      for (const char* name : {"keys", "rows", "weights"}) {
        TF_RETURN_IF_ERROR(
            SetShape(c, name, c->Vector(InferenceContext::kUnknownDim)));
      }
      return SetShape(c, "total", c->Scalar());
    })
    .Doc(R"doc(
Samples keys that have a row, with replacement.

lanes: All shards of the keys, of the last steps and of the counts.
numbers: Numbers of the vocabulary, which contain its step.
offsets: Cumulative numbers of buckets of the shards, [num_shards + 1].
num_sampled: Number of keys to sample.
seed: Two values. The outputs depend only on the seed and on the vocabulary.
keys: The sampled keys, [num_sampled], or [0] if no key has a row.
rows: Row of each sampled key.
weights: Weight of each sampled key.
total: Sum of the weights of all keys in the shards. A key is sampled with the
  probability weight / total.
by: 'uniform': all weights are 1. 'count': the weight of a key is its count,
  decayed to the step of the vocabulary, but at least 1.
first_bucket: First bucket of the first shard.
half_life_steps: As for `CountKeys`.
table: Name of the table, for error messages.
)doc");

}  // namespace
}  // namespace layoutmap
