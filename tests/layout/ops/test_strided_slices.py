"""Checks that slices on a mesh match plain TensorFlow.

Values and gradients are compared. No slice may crash the process.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.layout import pairs
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout import (
    LayoutMapWarning,
    default_mesh,
    to_host,
    to_mesh,
)

dtensor = tf.experimental.dtensor

MESH = mesh_of(batch=2, model=2)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def compare(function, x, axes, *others):
    """Compares `function` and its gradient on the mesh with the host."""

    def step(x, *others):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x * 1.0, *others)
            # The factors are distinct, so that gradients at wrong positions are
            # detected.
            loss = tf.reduce_sum(
                y * tf.reshape(tf.range(float(np.prod(shape))), shape)
            )
        return y, tape.gradient(loss, x)

    shape = function(tf.constant(x), *others).shape
    wanted = step(tf.constant(x), *map(tf.constant, others))
    with default_mesh(MESH):
        got = tf.function(step, autograph=False)(
            to_mesh(x, layout_of(MESH, *axes)),
            *(to_mesh(other, layout_of(MESH)) for other in others),
        )
    for mine, plain in zip(got, wanted):
        mine = to_host(mine)
        assert mine.shape == plain.shape, axes
        np.testing.assert_allclose(mine, plain, 1e-5, 1e-5, err_msg=str(axes))


# The comments contain the signal that ends the process if plain DTensor runs
# the slice.
SLICES = {
    "v[None]": lambda x: x[0, 0][None],  # SIGSEGV
    "x[None]": lambda x: x[None],  # SIGSEGV
    "x[:, None]": lambda x: x[:, None],  # SIGSEGV
    "x[None, :2]": lambda x: x[None, :2],  # SIGSEGV
    "x[:, 0, None]": lambda x: x[:, 0, None],
    "x[..., None]": lambda x: x[..., None],
    "x[:, None, 2:, None]": lambda x: x[:, None, 2:, None],
    "x[None, ..., ::-1]": lambda x: x[None, ..., ::-1],
    "x[-1, ..., None, 1::2]": lambda x: x[-1, ..., None, 1::2],
    "tf.strided_slice": lambda x: tf.strided_slice(
        x,
        [0, 0, 1],
        [0, 0, 3],
        [1, 1, 1],
        begin_mask=1,
        end_mask=1,
        new_axis_mask=2,
    ),
    "raw": lambda x: tf.raw_ops.StridedSlice(
        input=x, begin=[0, 0], end=[0, 2], strides=[1, 1], new_axis_mask=1
    ),
}


@pytest.mark.parametrize("name", SLICES)
def test_every_kind_of_mask_is_supported(name):
    for axes in (
        ("batch", None, None),
        ("batch", None, "model"),
        ("model", "batch", None),
    ):
        compare(SLICES[name], numbers(4, 4, 8), axes)


def test_index_may_be_computed_in_the_step():
    for axes in (("batch", None), (None, "model")):
        compare(
            lambda x, i: x[:, i - 9, None] + x[:, None, i],
            numbers(8, 8),
            axes,
            np.int32(2),
        )


def test_size_may_be_computed_from_shapes():
    for axes in (("batch", None), (None, "model")):
        compare(
            lambda x: x[:, None, : tf.shape(x)[1] // 2], numbers(8, 8), axes
        )


@pytest.mark.parametrize(
    "take",
    [
        lambda x, i: x[:, :i],
        lambda x, i: x[None, i:],
        lambda x, i: x[::i],
        lambda x, i: tf.raw_ops.StridedSlice(
            input=x,
            begin=tf.zeros([2], tf.int32),
            end=tf.fill([2], i),
            strides=[1, 1],
        ),
    ],
)
def test_end_computed_in_the_step_raises(take):
    # Without a correction, DTensor selects no elements and raises no error.
    with (
        default_mesh(MESH),
        pytest.raises(ValueError, match="must be known during tracing"),
    ):
        tf.function(take, autograph=False)(
            to_mesh(numbers(8, 8), layout_of(MESH, "batch", None)),
            to_mesh(np.int32(2), layout_of(MESH)),
        )


def test_raw_op_for_gradients_of_slices_is_supported():
    dy = numbers(4, 1, 2)

    def gradient(dy):
        return tf.raw_ops.StridedSliceGrad(
            shape=[4, 8],
            begin=[0, 0, 3],
            end=[0, 0, 5],
            strides=[1, 1, 1],
            dy=dy,
            begin_mask=1,
            end_mask=1,
            new_axis_mask=2,
        )

    with default_mesh(MESH):
        got = tf.function(gradient, autograph=False)(
            to_mesh(dy, layout_of(MESH, "batch", None, "model"))
        )
    np.testing.assert_array_equal(to_host(got), gradient(dy))


@pytest.mark.parametrize(
    "options, shape",
    [
        (
            dict(
                begin=[0, 0, 3],
                end=[0, 0, 5],
                strides=[1, 1, 1],
                begin_mask=1,
                end_mask=1,
                new_axis_mask=2,
            ),
            (4, 1, 2),
        ),
        (
            dict(
                begin=[0, 5],
                end=[0, 1],
                strides=[1, -2],
                begin_mask=1,
                end_mask=1,
            ),
            (4, 2),
        ),
        (dict(begin=[1], end=[2], strides=[1], shrink_axis_mask=1), (8,)),
    ],
)
def test_slices_can_be_assigned(options, shape):
    x, value = numbers(4, 8), numbers(*shape, seed=1)

    def update(x, value):
        return tf.raw_ops.TensorStridedSliceUpdate(
            input=x, value=value, **options
        )

    for axes in (("batch", None), (None, "model"), ("model", "batch")):
        with default_mesh(MESH):
            got = tf.function(update, autograph=False)(
                to_mesh(x, layout_of(MESH, *axes)),
                to_mesh(value, layout_of(MESH, *[None] * len(shape))),
            )
        np.testing.assert_array_equal(to_host(got), update(x, value))


def test_eager_slices_match_plain_tensorflow():
    x = numbers(4, 8)
    y = to_mesh(x, layout_of(MESH, "batch", "model"))
    with default_mesh(MESH):
        for got, wanted in (
            (y[:, None], x[:, None]),
            (y[None, 1], x[None, 1]),
            (y[..., None, ::-1], x[..., None, ::-1]),
        ):
            np.testing.assert_array_equal(to_host(got), wanted)


def test_out_of_range_slices_raise_as_in_plain_tensorflow():
    @tf.function(autograph=False)
    def step(x):
        return x[None, 4]

    with (
        default_mesh(MESH),
        pytest.raises(
            ValueError, match="slice index 4 of dimension 0 out of bounds"
        ),
    ):
        step(to_mesh(numbers(4, 8), layout_of(MESH, "batch", None)))


class Masked(keras.layers.Layer):
    """Layer that adds dimensions to its input and applies a boolean mask."""

    def call(self, x):
        steps = tf.range(6.0)[None, :]
        lengths = tf.reduce_max(x, axis=(1, 2))
        inside = tf.cast(steps < 3 * lengths[:, None], x.dtype)
        return x * inside[..., None] + keras.ops.arange(8.0)[None, None]


@pytest.mark.exhaustive
def test_model_that_adds_dimensions_trains():
    pairs.assert_trains_alike(
        lambda: pairs.sequential(
            (6, 8), keras.layers.Dense(8, name="d1"), Masked()
        ),
        pairs.SERIES,
        pairs.DENSE,
    )


@pytest.mark.parametrize(
    "take",
    [
        lambda found: found[0],
        lambda found: found[-1],
        lambda found: found[1][0],
        lambda found: found[-2, :1],
        lambda found: found[0, None],
    ],
)
def test_elements_of_a_dimension_of_unknown_size(take):
    # `RandAugment` uses the first place of a mask.
    x = np.array([0, 0, 3, 0, 5, 0, 7, 1], np.float32)

    def step(x):
        return take(tf.where(x > 0))

    with warnings.catch_warnings(), default_mesh(MESH):
        # The function is not replicated.
        warnings.simplefilter("error", LayoutMapWarning)
        got = tf.function(step, autograph=False)(
            to_mesh(x, layout_of(MESH, "batch"))
        )
    np.testing.assert_array_equal(to_host(got), step(x))


def test_slice_of_static_size_at_a_computed_start():
    # `RandomCrop` cuts images in this way.
    def step(x, start):
        with tf.GradientTape() as tape:
            tape.watch(x)
            other = start * 2
            y = tf.sin(x)[:, start : start + 3, 1:, other : 2 + other]
        return y, tape.gradient(y, x)

    x = np.arange(4 * 6 * 2 * 8, dtype=np.float32).reshape(4, 6, 2, 8)
    wanted = step(tf.constant(x), tf.constant(2))
    with default_mesh(MESH):
        got = tf.function(step, autograph=False)(
            to_mesh(x, layout_of(MESH, "batch", None, None, "model")),
            to_mesh(np.int32(2), layout_of(MESH)),
        )
    for mine, plain in zip(got, wanted):
        np.testing.assert_allclose(to_host(mine), plain, 1e-6, 1e-6)
