"""Checks that loops on a mesh match plain TensorFlow or raise an error.

Loops outside of a mesh must not be unrolled.
"""

import numpy as np
import pytest
import tensorflow as tf

from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout import default_mesh, to_host, to_mesh
from tf_layoutmap.layout.mesh.errors import UnsupportedByDTensorError

MESH = mesh_of(batch=2, model=2)
X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


def while_loop(x):
    return tf.while_loop(
        lambda i, y: i < 3, lambda i, y: (i + 1, tf.sin(y) * 2), (0, x)
    )[1]


def at_most(x):
    return tf.while_loop(
        lambda y: True, lambda y: (y * 2 + 1,), (x,), maximum_iterations=2
    )[0]


def array(x):
    states = tf.TensorArray(tf.float32, size=0, dynamic_size=True)

    def body(i, states):
        return i + 2, states.write(i, x[i] * tf.cast(i + 1, tf.float32))

    _, states = tf.while_loop(lambda i, _: i < 4, body, (0, states))
    return states.stack() + tf.reduce_sum(states.gather([2, 0]))


LOOPS = {
    "while_loop": while_loop,
    "maximum_iterations": at_most,
    "map_fn": lambda x: tf.map_fn(tf.sin, x),
    "scan": lambda x: tf.scan(lambda a, row: a * 0.5 + tf.sin(row), x),
    "foldr": lambda x: tf.foldr(lambda a, row: a * 0.5 + row, x),
    "TensorArray": array,
}


def step_of(function):
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x * 1.0)
        return y, tape.gradient(y, x)

    return tf.function(step, autograph=False)


@pytest.mark.parametrize("name", LOOPS)
def test_loop_matches_plain_tensorflow(name):
    wanted = step_of(LOOPS[name])(tf.constant(X))
    with default_mesh(MESH):
        got = step_of(LOOPS[name])(to_mesh(X, layout_of(MESH, "batch", None)))
    for mine, plain in zip(got, wanted):
        np.testing.assert_allclose(to_host(mine), plain, 1e-5, 1e-5)


@pytest.mark.parametrize("name", ["map_fn", "scan", "foldr"])
@pytest.mark.parametrize("axes", [(), ("batch", None, "model", None)])
def test_loop_over_tensors_of_several_dimensions(name, axes):
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 2)).astype(np.float32)
    x = x if axes else x[..., 0]
    wanted = step_of(LOOPS[name])(tf.constant(x))
    with default_mesh(MESH):
        layout = layout_of(MESH, *axes or [None] * x.ndim)
        got = step_of(LOOPS[name])(to_mesh(x, layout))
    for mine, plain in zip(got, wanted):
        np.testing.assert_allclose(to_host(mine), plain, 1e-5, 1e-5)


def test_write_does_not_change_the_previous_array():
    @tf.function(autograph=False)
    def step(x):
        first = tf.TensorArray(tf.float32, size=2).unstack(x[:2])
        second = first.write(0, x[2])
        return first.read(0) - second.read(0), second.concat()

    with default_mesh(MESH):
        difference, joined = map(
            to_host, step(to_mesh(X, layout_of(MESH, None, None)))
        )
    np.testing.assert_allclose(difference, X[0] - X[2], 1e-6)
    np.testing.assert_array_equal(joined, np.concatenate([X[2], X[1]]))


def until_large(x):
    rows = tf.TensorArray(tf.float32, size=1).unstack(x[:1])
    with tf.name_scope("grower"):
        return tf.while_loop(
            lambda y, _: tf.reduce_max(y) < 9.0,
            lambda y, rows: (y * 2.0, rows.write(0, y)),
            (x[0], rows),
        )[0]


REFUSED = {
    "number of steps of a loop on a mesh must be known.*'grower": until_large,
    "at most 2000 steps": lambda x: tf.while_loop(
        lambda i, y: i < 5000, lambda i, y: (i + 1, y), (0, x)
    )[1],
    "Received: index 7": lambda x: (
        tf.TensorArray(tf.float32, size=4).unstack(x).read(7)
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("sentence", REFUSED)
def test_loop_that_cannot_be_unrolled_raises(sentence):
    with (
        pytest.raises((UnsupportedByDTensorError, IndexError), match=sentence),
        default_mesh(MESH),
    ):
        step_of(REFUSED[sentence])(to_mesh(X, layout_of(MESH, None, None)))


@pytest.mark.parametrize("uses_device_number", [False, True])
def test_loop_with_data_dependent_end_runs_without_arrays(uses_device_number):
    """DTensor passes the number of a device only to programs that use it."""

    def body(x, numbers, count):
        # Each device computes its part of the random numbers.
        noise = (
            tf.random.stateless_uniform([4, 8], [1, 2])
            if uses_device_number
            else tf.zeros([4, 8])
        )
        return x * 2.0 + 1.0, numbers + tf.cast(3 * noise, tf.int32), count + 1

    @tf.function(autograph=False)
    def step(x, numbers):
        return tf.while_loop(
            lambda x, *_: tf.reduce_max(x) < 100.0,
            body,
            (x, numbers, tf.constant(7)),
        )

    numbers = np.arange(32, dtype=np.int32).reshape(4, 8)
    layout = layout_of(MESH, "batch", "model")
    with default_mesh(MESH):
        got = step(to_mesh(X, layout), to_mesh(numbers, layout))
    expected = step(tf.constant(X), tf.constant(numbers))
    for result, value in zip(got, expected):
        np.testing.assert_allclose(to_host(result), value, 1e-6)


def test_loops_are_not_unrolled_without_a_mesh():
    graph = (
        step_of(LOOPS["scan"])
        .get_concrete_function(tf.TensorSpec([None, 8]))
        .graph
    )
    assert {"While", "StatelessWhile"} & {
        op.type for op in graph.get_operations()
    }
    with default_mesh(MESH):
        rows = tf.data.Dataset.from_tensors(X).map(
            lambda x: tf.map_fn(lambda row: row + 1.0, x)
        )
    np.testing.assert_allclose(next(rows.as_numpy_iterator()), X + 1.0)


def test_gradient_of_a_loop_of_unknown_length_raises():
    # Without this error, DTensor would crash the process.
    mesh = mesh_of(batch=2, model=2)
    x = to_mesh(np.ones((8, 4), np.float32), layout_of(mesh, "batch", "model"))

    @tf.function(autograph=False)
    def step(x, count):
        def loop():
            return tf.while_loop(
                lambda i, y: i < count, lambda i, y: (i + 1, y[:, ::-1]), (0, x)
            )[1]

        # A loop inside a condition does not run from the host.
        return tf.cond(count > 0, loop, lambda: x)

    with (
        default_mesh(mesh),
        pytest.raises(
            UnsupportedByDTensorError, match="must not have a negative stride"
        ),
    ):
        step(x, to_mesh(np.int32(3), layout_of(mesh)))
