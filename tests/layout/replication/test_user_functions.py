"""Checks that user functions that DTensor does not support are replicated.

A warning is issued for each of these functions.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout import pairs, unsupported
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout import default_mesh, to_host, to_mesh
from tf_layoutmap.layout.mesh.errors import UnsupportedByDTensorError

L = keras.layers
AXES = {"d1.embeddings": ("model", None), "d2.kernel": (None, "model")}


class Halves(L.Layer):
    """Layer that splits a dimension that the mesh shards."""

    def call(self, x):
        a, b = unsupported.split(x, 2, axis=-1)
        return a * tf.sigmoid(b)


class Writer(keras.Sequential):
    """Model that appends tokens one by one, as generative models do."""

    def write(self, tokens, last):
        def step(i, tokens):
            best = tf.argmax(self(tokens)[:, i - 1], -1, tokens.dtype)
            column = tf.one_hot(i, tokens.shape[1], dtype=tokens.dtype)
            return i + 1, tokens * (1 - column) + best[:, None] * column

        return tf.while_loop(lambda i, _: i < last, step, (1, tokens))[1]

    def once(self, tokens):
        return self(tokens)


def make():
    return Writer(
        [
            keras.Input((6,), dtype="int32"),
            L.Embedding(16, 8, name="d1"),
            L.Dense(32, name="d2"),
            Halves(name="halves"),
            L.LayerNormalization(name="d3"),
        ]
    )


def tokens():
    return pairs.TOKENS[:8].astype(np.int32)


def results_of(model, *functions):
    return [
        np.asarray(function(tokens(), tf.constant(4)))
        for function in functions or (tf.function(model.write),)
    ]


def test_loop_of_unknown_length_matches_a_single_device():
    plain = results_of(pairs.plain(make))
    model = pairs.on_mesh(make, AXES)
    function = tf.function(model.write)
    with pytest.warns(
        tlm.layout.LayoutMapWarning,
        match="'write'.*everything, with all weights",
    ):
        on_mesh = results_of(model, function)
    np.testing.assert_array_equal(on_mesh, plain)
    # Each call must read the current values of the weights.
    model.layers[1].kernel.assign(-model.layers[1].kernel.numpy())
    other = pairs.plain(make)
    other.layers[1].kernel.assign(-other.layers[1].kernel.numpy())
    np.testing.assert_array_equal(
        results_of(model, function), results_of(other)
    )


def test_function_is_rejected_and_warns_once(recwarn):
    model = pairs.on_mesh(make, AXES)
    traces = []

    @tf.function
    def write(tokens, last):
        traces.append(tokens.shape)
        return model.write(tokens, last)

    for _ in range(3):
        results_of(model, write)
    # The function is traced once for a single device, once for the mesh and
    # once for replication.
    assert len(traces) == 3
    assert (
        len([w for w in recwarn if w.category is tlm.layout.LayoutMapWarning])
        == 1
    )


def test_gradients_of_a_custom_step_match_a_single_device():
    def step_of(model):
        @tf.function
        def step(tokens):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(tokens) ** 2)
            return loss, [
                tf.convert_to_tensor(g)
                for g in tape.gradient(
                    loss, [v.value for v in model.trainable_variables]
                )
            ]

        return step

    plain = step_of(pairs.plain(make))(tokens())
    with pytest.warns(tlm.layout.LayoutMapWarning, match="'step'"):
        on_mesh = step_of(pairs.on_mesh(make, AXES))(tokens())
    pairs.assert_alike(
        keras.tree.map_structure(np.asarray, plain),
        keras.tree.map_structure(tlm.layout.to_host, on_mesh),
    )


def trained_by_a_loop(model, mesh=None):
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    with (
        contextlib.nullcontext()
        if mesh is None
        else (tlm.layout.default_mesh(mesh))
    ):
        losses = [step(tokens()) for _ in range(3)]
    return [float(tlm.layout.to_host(x)) if mesh else float(x) for x in losses]


def with_statistics():
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            L.Embedding(16, 8, name="d1"),
            L.Dense(32, name="d2"),
            Halves(name="halves"),
            L.BatchNormalization(name="d3"),
            L.Dense(4, name="d4"),
        ]
    )


def test_custom_loop_gives_the_weights_of_a_single_device():
    axes = AXES | {"d3.*": ("model",), "d4.kernel": ("batch", "model")}
    plain = pairs.plain(with_statistics)
    on_mesh = pairs.on_mesh(with_statistics, axes)
    losses = trained_by_a_loop(plain)
    with pytest.warns(tlm.layout.LayoutMapWarning, match="'step'"):
        pairs.assert_alike(
            losses, trained_by_a_loop(on_mesh, mesh_of(batch=2, model=2))
        )
    pairs.assert_same_weights(plain, on_mesh)


def test_sharded_batch_is_gathered():
    model = pairs.on_mesh(make, AXES)
    mesh = mesh_of(batch=2, model=2)
    batch = tlm.layout.to_mesh(tokens(), layout_of(mesh, "batch", None))
    with pytest.warns(tlm.layout.LayoutMapWarning):
        on_mesh = tf.function(model.write)(batch, tf.constant(4))
    np.testing.assert_array_equal(
        [np.asarray(on_mesh)], results_of(pairs.plain(make))
    )


def test_strict_map_raises():
    mesh = mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh, strict=True)
    for key, axes in AXES.items():
        layout_map[key] = layout_of(mesh, *axes)
    with tlm.layout_map_scope(layout_map):
        model = make()
    with pytest.raises(
        UnsupportedByDTensorError,
        match="shard a Split operation in function 'write'",
    ):
        results_of(model)
    inside = tf.function(
        lambda tokens, last: tf.cond(
            last > 0, lambda: model.write(tokens, last), lambda: tokens
        )
    )
    with pytest.raises(
        UnsupportedByDTensorError, match="the number of steps of a loop"
    ):
        results_of(model, inside)
    with pytest.raises(
        UnsupportedByDTensorError,
        match="shard a Split operation in function 'once'",
    ):
        tf.function(model.once)(tokens())


def test_other_errors_are_unchanged():
    pairs.on_mesh(make, AXES)

    @tf.function
    def function(x):
        tf.debugging.assert_positive(x, "not positive")
        return x

    with pytest.raises(tf.errors.InvalidArgumentError, match="not positive"):
        function(tf.constant(-1))


def test_gradient_of_a_permutation_outside_of_the_function():
    mesh = mesh_of(batch=2, model=2)
    # The gradient function gets the permutation as an argument.
    x = np.arange(64, dtype=np.float32).reshape(4, 2, 8)
    function = tf.function(lambda x: tf.transpose(x, [1, 0, 2]) ** 2)
    with default_mesh(mesh):
        x = to_mesh(x, layout_of(mesh, "batch", None, None))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        gradient = tape.gradient(y, x)
    np.testing.assert_array_equal(to_host(gradient), 2 * to_host(x))
