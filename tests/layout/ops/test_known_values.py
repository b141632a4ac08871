"""Checks which tensors are treated as shapes.

Shapes are never sharded, so that DTensor knows their values during tracing.
"""

import pytest
import tensorflow as tf

from tf_layoutmap.layout.ops.corrections import is_shape

# Values that occur in gradients of transpositions and broadcasts.
SHAPES = {
    "order": lambda x: tf.raw_ops.InvertPermutation(x=[1, 0]),
    "order of a rank": lambda x: tf.range(tf.rank(x))[::-1],
    "axes": lambda x: tf.raw_ops.BroadcastGradientArgs(
        s0=tf.shape(x), s1=tf.constant([1])
    )[1],
    "kept": lambda x: tf.dynamic_stitch(
        [tf.range(tf.rank(x)), [0]], [tf.shape(x), [1]]
    ),
    "permutation of the gradient of a product": lambda x: tf.concat(
        [[1], tf.raw_ops.ListDiff(x=[0, 1], y=[1])[0]], 0
    ),
    "ones": lambda x: tf.fill(tf.shape(tf.shape(x)), 1),
}


@pytest.mark.parametrize("name", SHAPES)
def test_value_computed_from_shapes_is_a_shape(name):
    @tf.function
    def trace(x):
        assert is_shape(SHAPES[name](x))
        assert not is_shape(tf.cast(x[0], tf.int32))

    trace.get_concrete_function(tf.TensorSpec([None, 2]))
