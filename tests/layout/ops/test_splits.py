"""Splits along sharded dimensions, against one device."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout import pairs
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout.mesh import known_layouts, tracing, transfer
from tf_layoutmap.layout.replication import measured

dtensor = tf.experimental.dtensor

RNG = np.random.default_rng(0)
B, M = "batch", "model"


def squares(parts):
    return [part * part for part in parts]


def gated(x, w, v):
    """Returns a feed-forward network with a gate."""
    a, b = tf.split(tf.linalg.matmul(x, w), 2, axis=-1)
    return tf.linalg.matmul(tf.tanh(a) * b, v)


def attention_heads(x):
    """Returns a rotation of each head, as in rotary embeddings."""
    a, b = tf.split(x, 2, axis=-1)
    return [a - 2 * b, b + 2 * a]


def pinned(function):
    """Returns `function` of a tensor with a known layout."""
    return lambda x: function(
        tf.tanh(tracing.pin_sharded(x, tracing.mesh_of_trace(), (B, None, M)))
    )


# Each case: function, shapes and layouts of the inputs, layout of the result.
CASES = {
    "last": (
        lambda x: squares(tf.split(x, 2, axis=-1)),
        [((4, 8), (B, M))],
        (B, None),
    ),
    "sizes": (
        lambda x: squares(tf.split(x, [1, 3, 4], axis=1)),
        [((4, 8), (B, M))],
        (B, None),
    ),
    "first": (
        lambda x: squares(tf.split(x, 4)),
        [((4, 8), (B, M))],
        (None, M),
    ),
    "heads": (
        attention_heads,
        [((4, 3, 2, 8), (B, None, M, None))],
        (B, None, M, None),
    ),
    "along heads": (
        lambda x: squares(tf.split(x, 2, axis=2)),
        [((4, 3, 4, 2), (B, None, M, None))],
        (B, None, None, None),
    ),
    "known layout": (
        pinned(lambda x: squares(tf.split(x, 3, axis=1))),
        [((4, 6, 8), (B, None, M))],
        (B, None, M),
    ),
    "feed-forward": (
        gated,
        [
            ((4, 6, 8), (B, None, None)),
            ((8, 8), (None, M)),
            ((4, 8), (M, None)),
        ],
        (B, None, None),
    ),
    "elements for sharded weights": (
        lambda x, w: [
            tf.matmul(y, w)
            for y in tf.unstack(
                tracing.pin_sharded(x, tracing.mesh_of_trace(), (None, B, None))
            )
        ],
        [((2, 4, 8), (None, B, None)), ((8, 4), (M, None))],
        (B, None),
    ),
}


def with_gradients(function):
    def run(*xs):
        with tf.GradientTape() as tape:
            tape.watch(xs)
            y = function(*xs)
        return y, tape.gradient(y, xs)

    return run


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("error::tf_layoutmap.layout.LayoutMapWarning")
def test_split_matches_a_single_device(name):
    function, inputs, axes = CASES[name]
    mesh = mesh_of(batch=2, model=2)
    xs = [RNG.normal(size=shape) for shape, _ in inputs]
    with tlm.layout.default_mesh(mesh, B):
        found = tf.function(with_gradients(function))(
            *(
                transfer.to_mesh(x, layout_of(mesh, *one))
                for x, (_, one) in zip(xs, inputs)
            )
        )
    if name == "known layout":
        function = lambda x: squares(tf.split(tf.tanh(x), 3, axis=1))  # noqa: E731
    expected = with_gradients(function)(*map(tf.constant, xs))
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected)):
        np.testing.assert_allclose(
            transfer.to_host(one), other, rtol=1e-12, atol=1e-13
        )
    for one in tf.nest.flatten(found[0]):
        assert dtensor.fetch_layout(one) == layout_of(mesh, *axes)


def test_only_the_split_dimension_is_gathered():
    mesh = mesh_of(batch=2, model=2)
    x = RNG.normal(size=(4, 3, 4, 2))
    with tlm.layout.default_mesh(mesh, B):
        x = transfer.to_mesh(x, layout_of(mesh, B, None, M, None))
        step = tf.function(lambda x: squares(tf.split(x, 2, axis=2)))
        step(x)
        name = step.get_concrete_function(x).name
    (program,) = measured.compiled_functions(tf.compat.as_str(name))
    shapes = [
        [dim.size for dim in node.attr["_output_shapes"].list.shape[0].dim]
        for node in program.node_def
        if node.op.startswith("Collective")
    ]
    # One small all-reduce determines the layout.
    assert shapes == [[2, 3, 4, 2], [2, 3, 1, 2]]


def test_eager_split_keeps_other_dimensions():
    mesh = mesh_of(batch=2, model=2)
    x = RNG.normal(size=(4, 6, 8))
    first, second = tf.split(
        transfer.to_mesh(x, layout_of(mesh, B, M, None)), 2, axis=1
    )
    np.testing.assert_array_equal(transfer.to_host(second), x[:, 3:])
    assert dtensor.fetch_layout(first) == layout_of(mesh, B, None, None)


UNKNOWN = [
    (None, None, None, None),
    (B, None, None, None),
    (B, None, M, None),
    (B, None, None, M),
]


@pytest.mark.covering(1, 4)
@pytest.mark.parametrize("after", [(B, None, M), (B, M, None), (M, None, B)])
@pytest.mark.parametrize("before", UNKNOWN)
def test_unstacked_tensor_of_unknown_layout_has_any_consumer(before, after):
    mesh = mesh_of(batch=2, model=2)
    x = RNG.normal(size=(4, 6, 8, 2))

    @tf.function
    def run(x):
        first, second = tf.unstack(tf.reshape(x, x.shape), axis=-1)
        return dtensor.relayout(first, layout_of(mesh, *after)), second

    with tlm.layout.default_mesh(mesh, B):
        first, second = run(transfer.to_mesh(x, layout_of(mesh, *before)))
    np.testing.assert_array_equal(transfer.to_host(first), x[..., 0])
    np.testing.assert_array_equal(transfer.to_host(second), x[..., 1])


@pytest.mark.covering(1, 4)
@pytest.mark.parametrize("weight", [(M, None), (None, M), (B, M)])
@pytest.mark.parametrize("before", UNKNOWN)
def test_gradient_of_an_unstacked_tensor_of_unknown_layout(before, weight):
    mesh = mesh_of(batch=2, model=2)
    xs = RNG.normal(size=(4, 6, 8, 2)), RNG.normal(size=(8, 4))

    def product(x, w):
        first, second = tf.unstack(tf.reshape(x, x.shape), axis=-1)
        return tf.matmul(first * second, w)

    with tlm.layout.default_mesh(mesh, B):
        found = tf.function(with_gradients(product))(
            *(
                transfer.to_mesh(x, layout_of(mesh, *axes))
                for x, axes in zip(xs, (before, weight))
            )
        )
    expected = with_gradients(product)(*map(tf.constant, xs))
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected)):
        np.testing.assert_allclose(
            transfer.to_host(one), other, rtol=1e-12, atol=1e-13
        )


@pytest.mark.parametrize("split", [tf.split, tf.unstack])
@pytest.mark.parametrize("before", UNKNOWN)
def test_split_with_an_unknown_number_of_samples(before, split):
    mesh = mesh_of(batch=2, model=2)
    x = RNG.normal(size=(4, 6, 8, 2))
    parts_of = functools.partial(
        split, **({} if split is tf.unstack else {"num_or_size_splits": 2})
    )

    def product(x):
        first, second = parts_of(tf.square(x), axis=-1)
        return first * second

    step = tf.function(
        with_gradients(product),
        input_signature=[tf.TensorSpec([None, 6, 8, 2], tf.float64)],
    )
    with tlm.layout.default_mesh(mesh, B):
        found = step(transfer.to_mesh(x, layout_of(mesh, *before)))
    expected = with_gradients(product)(tf.constant(x))
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected)):
        np.testing.assert_allclose(transfer.to_host(one), other, rtol=1e-12)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("error::tf_layoutmap.layout.LayoutMapWarning")
def test_strict_map_accepts_a_split_of_sharded_activations():
    def make():
        x = inputs = keras.Input((8,))
        x = keras.layers.Dense(16, name="d1")(x)
        a, b = keras.ops.split(x, 2, axis=-1)
        outputs = keras.layers.Dense(4, name="d2")(keras.ops.silu(a) * b)
        return keras.Model(inputs, outputs)

    model = pairs.assert_trains_alike(make, pairs.FEATURES, pairs.DENSE)
    report = tlm.LayoutMap(mesh_of(batch=2, model=2)).explain(model)
    assert report.replicated_ops == ()
    assert all(one.gathered_bytes == 0 for one in report.measured)


def test_known_layouts():
    mesh = mesh_of(batch=2, model=2)
    found = {}

    @tf.function
    def step(x):
        y = tracing.pin_sharded(x, mesh, (B, None, M))
        for name, one in {
            "pinned": y,
            "elementwise": tf.tanh(y) + 1 - tf.cast(y, tf.float64),
            "transposed": tf.transpose(y, [2, 0, 1]),
            "samples": tracing.pin_unsharded_samples(x, mesh),
            "argument": x,
            "sum": tf.reduce_sum(y, 0),
        }.items():
            found[name] = known_layouts.known_axes(one)
        return y

    with tlm.layout.default_mesh(mesh, B):
        step.get_concrete_function(tf.TensorSpec((4, 2, 8), tf.float64))
    assert found == {
        "pinned": (B, None, M),
        "elementwise": (B, None, M),
        "transposed": (M, B, None),
        # The relayout keeps the sharding of the samples.
        "samples": (B, None, None),
        "argument": None,
        "sum": None,
    }
