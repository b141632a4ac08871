"""This package's random ops are bitwise identical to TensorFlow's ops."""

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tf_layoutmap._core import ops

SHAPES = [[], [0], [3], [5, 7], [2, 1000, 33]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64]
)
@pytest.mark.parametrize("seeds", [(1, 2), (0, 9), (2**40, -3)])
def test_floats_are_bitwise_identical_to_tensorflow(shape, dtype, seeds):
    sizes = tf.constant(shape, tf.int32)

    def drawn(op):
        # The function draws twice, because a kernel keeps the state of its
        # generator.
        return tf.function(
            lambda: [
                op(shape=sizes, seed=seeds[0], seed2=seeds[1], dtype=dtype)
                for _ in range(2)
            ]
        )

    actual, expected = (
        drawn(ops.random_uniform),
        drawn(tf.raw_ops.RandomUniform),
    )
    for _ in range(2):
        for a, b in zip(actual(), expected()):
            np.testing.assert_array_equal(
                tf.cast(a, tf.float64), tf.cast(b, tf.float64)
            )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
@pytest.mark.parametrize("limits", [(0, 1), (-5, 100), (-(2**31), 2**31 - 1)])
def test_integers_are_bitwise_identical_to_tensorflow(shape, dtype, limits):
    sizes = tf.constant(shape, tf.int32)
    low, high = (tf.constant(limit, dtype) for limit in limits)

    def drawn(op):
        return tf.function(
            lambda: op(shape=sizes, minval=low, maxval=high, seed=4, seed2=5)
        )

    actual = drawn(ops.random_uniform_int)
    expected = drawn(tf.raw_ops.RandomUniformInt)
    for _ in range(2):
        np.testing.assert_array_equal(actual(), expected())


@pytest.mark.parametrize(
    "shape, low, high, words",
    [
        (
            [2],
            3,
            3,
            "`maxval` must be greater than `minval`.*minval=3, maxval=3",
        ),
        ([2], [1], 3, "`minval` must be a scalar.*shape"),
        ([-2], 1, 3, "must be|invalid|>= 0|-2"),
        ([[2]], 1, 3, "shape|rank|vector"),
    ],
)
def test_invalid_input_raises(shape, low, high, words):
    with pytest.raises(
        (tf.errors.InvalidArgumentError, ValueError), match=words
    ):
        ops.random_uniform_int(
            shape=tf.constant(shape),
            minval=tf.constant(low),
            maxval=tf.constant(high),
            seed=1,
            seed2=1,
        )


PHILOX = 1
STATELESS = {
    "uniform": tf.raw_ops.StatelessRandomUniformV2,
    "normal": tf.raw_ops.StatelessRandomNormalV2,
    "truncated_normal": tf.raw_ops.StatelessTruncatedNormalV2,
}
words = st.integers(0, 2**64 - 1)


sizes = st.integers(0, 70)


@st.composite
def blocks(draw):
    """Returns a full shape, and the start, shape and row step of a block.

    The sizes include products near 2,048, the number of values that the kernel
    draws at a time, and near multiples of 4. Some blocks extend beyond the
    tensor.
    """
    full = draw(st.lists(sizes, max_size=3))
    start = [draw(st.integers(0, size + 1)) for size in full]
    shape = [draw(st.integers(0, size + 2)) for size in full]
    if draw(st.booleans()):
        # Blocks of complete rows are the most frequent blocks.
        start[1:], shape[1:] = [0] * len(full[1:]), full[1:]
    return full, start, shape, draw(st.integers(1, 3)) if full else 1


def block_of(full, start, shape, row_step):
    """Returns a block of an array, with zeros outside of the array."""
    block = np.zeros(shape, full.dtype)
    for index in np.ndindex(*shape):
        source = tuple(
            begin + i * (row_step if dim == 0 else 1)
            for dim, (begin, i) in enumerate(zip(start, index, strict=True))
        )
        if all(i < size for i, size in zip(source, full.shape, strict=True)):
            block[index] = full[source]
    return block


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    blocks(),
    st.sampled_from([tf.float16, tf.bfloat16, tf.float32, tf.float64]),
    st.sampled_from([*STATELESS, "constant"]),
    st.tuples(words, words, words),
    st.floats(-2, 2),
    st.floats(-2, 2),
)
def test_random_blocks_match_tensorflow(
    block, dtype, distribution, generator, factor, offset
):
    full, start, shape, row_step = block
    counter, key = generator[:2], generator[2:]
    factor, offset = (tf.cast(one, dtype) for one in (factor, offset))
    found = ops.random_block(
        **arguments(
            shape=tf.constant(shape, tf.int64, [len(shape)]),
            full_shape=tf.constant(full, tf.int64, [len(full)]),
            start=tf.constant(start, tf.int64, [len(start)]),
            row_step=tf.constant(row_step, tf.int64),
            generator=tf.constant(generator, tf.uint64),
            factor=factor,
            offset=offset,
            distribution=distribution,
        )
    )
    expected = (
        tf.fill(full, offset)
        if distribution == "constant"
        else (
            STATELESS[distribution](
                shape=tf.constant(full, tf.int32, [len(full)]),
                key=tf.constant(key, tf.uint64),
                counter=tf.constant(counter, tf.uint64),
                alg=PHILOX,
                dtype=dtype,
            )
            * factor
            + offset
        )
    )
    np.testing.assert_array_equal(
        tf.cast(found, tf.float64),
        block_of(tf.cast(expected, tf.float64).numpy(), start, shape, row_step),
    )


def arguments(**changed):
    return {
        "shape": tf.constant([2, 3], tf.int64),
        "full_shape": tf.constant([4, 3], tf.int64),
        "start": tf.constant([2, 0], tf.int64),
        "row_step": tf.constant(1, tf.int64),
        "generator": tf.constant([1, 2, 3], tf.uint64),
        "factor": tf.constant(1.0),
        "offset": tf.constant(1.0),
        "distribution": "uniform",
        **changed,
    }


@pytest.mark.parametrize(
    "changed, words",
    [
        (
            {"generator": tf.constant([1, 2], tf.uint64)},
            "`generator` must be a counter of two numbers and a key.*2 numbers",
        ),
        ({"generator": tf.constant(1, tf.uint64)}, "`generator`"),
        ({"factor": tf.constant([1.0])}, "`factor`"),
        ({"offset": tf.constant([1.0])}, "`offset`"),
        ({"shape": tf.constant([-2, 3], tf.int64)}, "must be|invalid|>= 0|-2"),
        (
            {"shape": tf.constant([2**62, 3], tf.int64)},
            r"more than 2\*\*63|overflow|too large|[Mm]ultipl",
        ),
        (
            {"start": tf.constant([0], tf.int64)},
            "`start` must have one number per dimension.*start with 1 numbers",
        ),
        (
            {"full_shape": tf.constant([4], tf.int64)},
            "must have one number per dimension",
        ),
        (
            {"start": tf.constant([0, -1], tf.int64)},
            r"`start` must not be negative. Received: start\[1\]=-1",
        ),
        (
            {"row_step": tf.constant(0, tf.int64)},
            "`row_step` must be at least 1. Received: row_step=0",
        ),
        ({"row_step": tf.constant([1], tf.int64)}, "`row_step`"),
    ],
)
def test_invalid_input_of_random_block_raises(changed, words):
    with pytest.raises(
        (
            tf.errors.InvalidArgumentError,
            ValueError,
            tf.errors.ResourceExhaustedError,
        ),
        match=words,
    ):
        ops.random_block(**arguments(**changed))
