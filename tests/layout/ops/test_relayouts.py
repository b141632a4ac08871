"""Checks ops whose results have the layout that their inputs determine."""

import numpy as np
import pytest
import tensorflow as tf

from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout.mesh import tracing, transfer

dtensor = tf.experimental.dtensor

X = np.random.default_rng(0).normal(size=(4, 6, 8))
LAYOUTS = [
    (None, None, None),
    ("batch", None, "model"),
    (None, "model", None),
    ("model", "batch", None),
]


def on_mesh(function, *layouts):
    """Returns `function` of `X` in each layout, and the layout of the result.

    Args:
      function: Function of tensors on a mesh.
      *layouts: Layouts of the arguments.
    """
    mesh = mesh_of(batch=2, model=2)
    args = [transfer.to_mesh(X, layout_of(mesh, *axes)) for axes in layouts]
    with tracing.default_mesh(mesh):
        result = tf.function(function)(*args)
    return transfer.to_host(result), tuple(
        None if spec == dtensor.UNSHARDED else spec
        for spec in dtensor.fetch_layout(result).sharding_specs
    )


def relaid(x, *axes):
    return dtensor.relayout(x, layout_of(mesh_of(batch=2, model=2), *axes))


@pytest.mark.covering(1)
@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS[1:])
def test_transpose_does_not_get_the_layout_of_its_consumer(before, after):
    def transposed(x):
        x = tracing.with_layout_of_producer(x)
        y = tracing.with_layout_of_producer(tf.transpose(x, [0, 2, 1]))
        return relaid(y, *after)

    result, layout = on_mesh(transposed, before)
    np.testing.assert_array_equal(result, X.transpose([0, 2, 1]))
    assert layout == after


def test_chain_of_tensors_with_layouts_of_their_producers_has_a_gradient():
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in range(3):
                y = tracing.with_layout_of_producer(tf.square(y))
            y = tf.reduce_sum(relaid(y, "batch", "model", None))
        return tape.gradient(y, x)

    result, layout = on_mesh(gradient, ("batch", None, "model"))
    np.testing.assert_allclose(result, 8 * X**7, rtol=1e-12)
    assert layout == ("batch", None, "model")


@pytest.mark.parametrize("after", LAYOUTS[1:3])
def test_gradient_of_a_relayout_can_be_sharded_further(after):
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tracing.pin_unsharded_samples(
                tf.square(x), mesh_of(batch=2, model=2)
            )
            y = tf.reduce_sum(tf.square(y))
        return relaid(tape.gradient(y, x), *after)

    result, layout = on_mesh(gradient, (None, None, None))
    np.testing.assert_allclose(result, 4 * X**3, rtol=1e-12)
    assert layout == after


@pytest.mark.covering(1)
@pytest.mark.parametrize("axis", (0, 1, -1))
@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS[1:])
def test_concatenation_has_the_right_order_in_each_layout(before, axis, after):
    result, layout = on_mesh(
        lambda x, y: relaid(2 * tf.concat([x, y], axis), *after),
        before,
        LAYOUTS[1],
    )
    np.testing.assert_array_equal(result, 2 * np.concatenate([X, X], axis))
    assert layout == after


@pytest.mark.covering(1)
@pytest.mark.parametrize("axis", (0, 1, -1))
@pytest.mark.parametrize("before", LAYOUTS)
def test_concatenation_gathers_only_one_dimension(before, axis):
    result, layout = on_mesh(lambda x: tf.concat([x, 2 * x], axis), before)
    np.testing.assert_array_equal(result, np.concatenate([X, 2 * X], axis))
    assert layout == tuple(
        None if dim == axis % 3 else name for dim, name in enumerate(before)
    )
