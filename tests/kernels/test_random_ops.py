"""RandomUniform and RandomUniformInt draw the bits of TensorFlow's own ops."""

import numpy as np
import pytest
import tensorflow as tf

from tf_layoutmap import _ops

SHAPES = [[], [0], [3], [5, 7], [2, 1000, 33]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [
    tf.float16, tf.bfloat16, tf.float32, tf.float64])
@pytest.mark.parametrize("seeds", [(1, 2), (0, 9), (2**40, -3)])
def test_floats(shape, dtype, seeds):
    sizes = tf.constant(shape, tf.int32)

    def drawn(op):
        # Kernels keep where they are, so twice in one function.
        return tf.function(lambda: [op(
            shape=sizes, seed=seeds[0], seed2=seeds[1], dtype=dtype)
            for _ in range(2)])

    ours, theirs = drawn(_ops.random_uniform), drawn(tf.raw_ops.RandomUniform)
    for _ in range(2):
        for a, b in zip(ours(), theirs()):
            np.testing.assert_array_equal(
                tf.cast(a, tf.float64), tf.cast(b, tf.float64))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
@pytest.mark.parametrize("limits", [(0, 1), (-5, 100), (-2**31, 2**31 - 1)])
def test_integers(shape, dtype, limits):
    sizes = tf.constant(shape, tf.int32)
    low, high = (tf.constant(limit, dtype) for limit in limits)

    def drawn(op):
        return tf.function(lambda: op(
            shape=sizes, minval=low, maxval=high, seed=4, seed2=5))

    ours = drawn(_ops.random_uniform_int)
    theirs = drawn(tf.raw_ops.RandomUniformInt)
    for _ in range(2):
        np.testing.assert_array_equal(ours(), theirs())


@pytest.mark.parametrize("shape, low, high, said", [
    ([2], 3, 3, "`maxval` must be greater than `minval`.*minval=3, maxval=3"),
    ([2], [1], 3, "`minval` must be a scalar.*shape"),
    ([-2], 1, 3, "must be|invalid|>= 0|-2"),
    ([[2]], 1, 3, "shape|rank|vector")])
def test_bad_input_is_refused(shape, low, high, said):
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError),
                       match=said):
        _ops.random_uniform_int(
            shape=tf.constant(shape), minval=tf.constant(low),
            maxval=tf.constant(high), seed=1, seed2=1)
