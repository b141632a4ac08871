"""Partitioners match TensorFlow's partitioners if their results are valid."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tf_layoutmap import partition

theirs = tf.distribute.experimental.partitioners
shapes = st.lists(st.integers(1, 300), min_size=1, max_size=3)
dtypes = st.sampled_from(
    [tf.float32, tf.float16, tf.bfloat16, tf.int64, tf.bool, tf.string]
)


@given(shapes, dtypes, st.integers(1, 400), st.data())
def test_fixed_shards_equals_tensorflow(shape, dtype, num_shards, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    shape = tf.TensorShape(shape)
    assert partition.FixedShardsPartitioner(num_shards)(
        shape, dtype, axis
    ) == theirs.FixedShardsPartitioner(num_shards)(shape, dtype, axis)


@given(
    shapes,
    dtypes,
    st.integers(1, 5000),
    st.integers(1, 400),
    st.integers(1, 40),
    st.data(),
)
def test_min_size_equals_tensorflow(
    shape, dtype, num_bytes, max_shards, string_bytes, data
):
    axis = data.draw(st.integers(0, len(shape) - 1))
    shape = tf.TensorShape(shape)
    arguments = num_bytes, max_shards, string_bytes
    assert partition.MinSizePartitioner(*arguments)(
        shape, dtype, axis
    ) == theirs.MinSizePartitioner(*arguments)(shape, dtype, axis)


@given(
    shapes,
    dtypes,
    st.integers(1, 5000),
    st.one_of(st.none(), st.integers(1, 400)),
    st.integers(1, 40),
    st.data(),
)
def test_max_size_equals_tensorflow(
    shape, dtype, num_bytes, max_shards, string_bytes, data
):
    axis = data.draw(st.integers(0, len(shape) - 1))
    shape = tf.TensorShape(shape)
    arguments = num_bytes, max_shards, string_bytes
    assert partition.MaxSizePartitioner(*arguments)(
        shape, dtype, axis
    ) == theirs.MaxSizePartitioner(*arguments)(shape, dtype, axis)


@pytest.mark.parametrize(
    "partitioner",
    [
        partition.FixedShardsPartitioner(4),
        partition.MinSizePartitioner(1, 4),
        partition.MaxSizePartitioner(1),
    ],
)
def test_a_table_without_rows_is_one_shard(partitioner):
    assert partitioner((0, 5), "float32") == [1, 1]


def test_negative_axes_are_supported():
    partitioner = partition.FixedShardsPartitioner(2)
    assert partitioner((8, 3), "float32", axis=-1) == [1, 2]


def test_numpy_dtypes_are_supported():
    partitioner = partition.MaxSizePartitioner(16)
    assert partitioner((8, 2), np.float64) == [8, 1]
    assert partitioner((8, 2), np.dtype("int8")) == [1, 1]


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda: partition.FixedShardsPartitioner(0),
            "`num_shards` must be positive",
        ),
        (
            lambda: partition.MinSizePartitioner(0),
            "`min_shard_bytes` must be positive",
        ),
        (
            lambda: partition.MinSizePartitioner(max_shards=-1),
            "`max_shards` must be positive",
        ),
        (
            lambda: partition.MaxSizePartitioner(0),
            "`max_shard_bytes` must be positive",
        ),
        (
            lambda: partition.MaxSizePartitioner(9, max_shards=0),
            "`max_shards` must be positive",
        ),
        (
            lambda: partition.MaxSizePartitioner(9, bytes_per_string=0),
            "`bytes_per_string` must be positive",
        ),
        (
            lambda: partition.FixedShardsPartitioner(2)((), "float32"),
            "at least one axis",
        ),
        (
            lambda: partition.FixedShardsPartitioner(2)(
                tf.TensorShape([None, 3]), tf.float32
            ),
            "fully defined",
        ),
        (
            lambda: partition.FixedShardsPartitioner(2)(
                tf.TensorShape(None), tf.float32
            ),
            "fully defined",
        ),
        (
            lambda: partition.FixedShardsPartitioner(2)(
                (3,), "float32", axis=1
            ),
            "`axis` must be at most 0",
        ),
    ],
)
def test_invalid_numbers_raise(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_non_integer_number_of_shards_raises():
    with pytest.raises(TypeError, match="`num_shards` must be an integer"):
        partition.FixedShardsPartitioner(2.0)


def test_calling_the_base_class_raises():
    with pytest.raises(NotImplementedError, match="__call__"):
        partition.Partitioner()((3,), "float32")
