// Ops that keep the strings of keys. docs/ops.md documents the ops.

#include "absl/status/status.h"
#include "cc/ops/ports.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace layoutmap {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("LayoutMap>CreateStringStore")
    .Output("store: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Creates a store of strings, which exists as long as there is a handle to it.

store: Handle that the other ops accept.
)doc");

REGISTER_OP("LayoutMap>KeepStrings")
    .Input("store: resource")
    .Input("training: bool")
    .Input("shards: num_shards * resource")
    .Input("offsets: int64")
    .Input("keys: num_inputs * int64")
    .Input("strings: num_inputs * string")
    .Attr("num_shards: int >= 1")
    .Attr("num_inputs: int >= 0")
    .Attr("removes_all: bool = false")
    .Attr("table: string = ''")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Adds the strings of keys that have a row, and removes strings of other keys.

training: If false, the op changes nothing.
shards: Keys of the vocabulary, as in `FindKeys`.
offsets: Cumulative numbers of buckets, [num_shards + 1].
keys: Hashes of the strings, of any shape.
strings: The strings, in the shapes of `keys`.
removes_all: Whether the strings of all keys without a row are removed.
  Otherwise a part of the store is searched for such keys, whose size is
  proportional to the number of new strings.
table: Name of the table, for messages.
)doc");

REGISTER_OP("LayoutMap>ReadStrings")
    .Input("store: resource")
    .Input("keys: int64")
    .Output("strings: string")
    .Output("is_known: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle keys;
      TF_RETURN_IF_ERROR(GetShape(c, "keys", &keys));
      TF_RETURN_IF_ERROR(SetShape(c, "strings", keys));
      return SetShape(c, "is_known", keys);
    })
    .Doc(R"doc(
Returns the strings of keys.

keys: Any shape.
strings: The strings. If the store has no string for a key, an empty string.
is_known: Whether the store has a string for each key.
)doc");

REGISTER_OP("LayoutMap>LoadStrings")
    .Input("store: resource")
    .Input("keys: int64")
    .Input("strings: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Replaces the contents of a store, for example by the strings of a checkpoint.

keys: Hashes of the strings, of any shape.
strings: The strings, in the shape of `keys`.
)doc");

REGISTER_OP("LayoutMap>DescribeStrings")
    .Input("store: resource")
    .Output("num_strings: int64")
    .Output("num_bytes: int64")
    .Output("num_collisions: int64")
    .Output("collisions: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (const char* name : {"num_strings", "num_bytes", "num_collisions"}) {
        TF_RETURN_IF_ERROR(SetShape(c, name, c->Scalar()));
      }
      return SetShape(c, "collisions",
                      c->Matrix(InferenceContext::kUnknownDim, 2));
    })
    .Doc(R"doc(
Returns the size of a store, and the strings that have the same hash.

num_strings: Number of strings in the store.
num_bytes: Sum of the lengths of these strings.
num_collisions: Number of lookups in training steps whose string differs from
  the stored string of its key.
collisions: Stored string and other string of different collisions, at most 16
  pairs.
)doc");

}  // namespace
}  // namespace layoutmap
