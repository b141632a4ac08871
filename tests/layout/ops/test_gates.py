"""Recurrent layers whose weights are sharded, against one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from keras import layers as L

import tf_layoutmap as tlm
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout import assignments
from tf_layoutmap.layout.mesh import transfer
from tf_layoutmap.layout.ops import gates

dtensor = tf.experimental.dtensor

RNG = np.random.default_rng(0)
SERIES = RNG.normal(size=(8, 3, 4))
PADDED = np.where(
    np.arange(3)[:, None] < RNG.integers(1, 4, (8, 1, 1)), SERIES, 0
)
FRAMES = {rank: RNG.normal(size=(8, 2, *[3] * rank, 4)) for rank in (1, 2, 3)}
LABELS = np.arange(8) % 4
# Sums over shards are computed in a different order.
FLOAT64 = dict(rtol=1e-12, atol=1e-13)

OUT = {
    "kernel": (None, "model"),
    "recurrent_kernel": (None, "model"),
    "bias": ("model",),
}
IN = {"kernel": ("model", None), "recurrent_kernel": ("model", None)}
MIXED = {"kernel": ("model", None), "recurrent_kernel": (None, "model")}
# The bias of a GRU with `reset_after` has two rows.
GRU_OUT = {**OUT, "bias": (None, "model")}


def of_convolution(rank, axes):
    """Returns layouts of convolution kernels that are sharded by channels."""
    return {
        name: (*[None] * rank, *value) if name != "bias" else value
        for name, value in axes.items()
    }


def train(model, x, library):
    """Trains a model for two steps; returns losses, weights and predictions."""
    library.utils.set_random_seed(7)
    model.compile(
        library.optimizers.SGD(0.5, momentum=0.9),
        library.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    losses = model.fit(
        x, LABELS, batch_size=4, shuffle=False, verbose=0
    ).history["loss"]
    return losses, model.get_weights(), model.predict(x, 4, verbose=0)


def assert_trains_alike(make, x, axes, mesh=None, library=keras):
    """Compares training with one device; no weight is gathered."""
    mesh = mesh or mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh, strict=True)
    for name, value in axes.items():
        layout_map[f".*(cell|lstm|gru).*[./]{name}$"] = layout_of(mesh, *value)

    def build():
        library.utils.set_random_seed(3)
        shape = x.shape[1:]
        return library.Sequential(
            [
                library.Input(shape)
                if library is keras
                else library.layers.InputLayer(shape),
                *make(library.layers),
                library.layers.Flatten(),
                library.layers.Dense(4),
            ]
        )

    plain = build()
    weights = plain.get_weights()
    expected = train(plain, x, library)
    with tlm.layout_map_scope(layout_map):
        model = build()
    model.set_weights(weights)
    found = train(model, x, library)
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected)):
        np.testing.assert_allclose(one, other, **FLOAT64)
    report = layout_map.explain(model)
    assert report.replicated_ops == ()
    assert {one.step for one in report.measured} == {"train", "predict"}
    for one in report.measured:
        assert one.gathered_bytes == 0, str(one)
        if one.layer and any(
            name in one.layer for name in ("lstm", "gru", "rnn")
        ):
            # The initial state is zero and replicated.
            assert one.replicated < 0.06, str(one)
    return model


@pytest.fixture(autouse=True)
def _float64():
    before = keras.config.floatx(), tf_keras.backend.floatx()
    policy = keras.config.dtype_policy()
    tf_keras_policy = tf_keras.mixed_precision.global_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    tf_keras.backend.set_floatx("float64")
    # An earlier test can have set a policy, which does not follow `set_floatx`.
    tf_keras.mixed_precision.set_global_policy("float64")
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(policy)
    tf_keras.backend.set_floatx(before[1])
    tf_keras.mixed_precision.set_global_policy(tf_keras_policy)


# Each case: layers, inputs, layouts.
CASES = {
    "LSTM": (lambda m: [m.LSTM(4)], SERIES, OUT),
    "LSTM, inputs": (lambda m: [m.LSTM(4)], SERIES, IN),
    "LSTM, mixed": (
        lambda m: [m.LSTM(4, go_backwards=True, use_bias=False)],
        SERIES,
        MIXED,
    ),
    "LSTM, mask": (lambda m: [m.Masking(), m.LSTM(4)], PADDED, OUT),
    "GRU": (lambda m: [m.GRU(4)], SERIES, GRU_OUT),
    "GRU, inputs": (lambda m: [m.GRU(4)], SERIES, IN),
    "GRU, mask": (
        lambda m: [m.Masking(), m.GRU(4, return_sequences=True)],
        PADDED,
        GRU_OUT,
    ),
    "GRU, reset before": (
        lambda m: [m.GRU(4, reset_after=False)],
        SERIES,
        OUT,
    ),
    "GRU, reset before, inputs": (
        lambda m: [m.GRU(4, reset_after=False)],
        SERIES,
        IN,
    ),
    "SimpleRNN": (lambda m: [m.SimpleRNN(4)], SERIES, OUT),
    "SimpleRNN, inputs": (lambda m: [m.SimpleRNN(4)], SERIES, IN),
    "Bidirectional": (lambda m: [m.Bidirectional(m.LSTM(4))], SERIES, OUT),
    "cells": (
        lambda m: [m.RNN([m.LSTMCell(4), m.GRUCell(4, reset_after=False)])],
        SERIES,
        OUT,
    ),
    "implementation 1": (
        lambda m: [m.RNN(m.LSTMCell(4, implementation=1))],
        SERIES,
        OUT,
    ),
    "ConvLSTM1D": (
        lambda m: [m.ConvLSTM1D(2, 2, padding="same", strides=2)],
        FRAMES[1],
        of_convolution(1, OUT),
    ),
    "ConvLSTM2D, inputs": (
        lambda m: [m.ConvLSTM2D(2, 2, return_sequences=True)],
        FRAMES[2],
        of_convolution(2, IN),
    ),
    "ConvLSTM3D": (
        lambda m: [m.ConvLSTM3D(2, 2)],
        FRAMES[3],
        of_convolution(3, OUT),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_layer_matches_a_single_device_and_gathers_no_weights(name):
    make, x, axes = CASES[name]
    assert_trains_alike(make, x, axes)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "LSTM",
        "LSTM, inputs",
        "GRU",
        "GRU, reset before",
        "Bidirectional",
        "implementation 1",
        "ConvLSTM1D",
    ],
)
def test_layer_of_tf_keras_matches_a_single_device(name):
    make, x, axes = CASES[name]
    assert_trains_alike(make, x, axes, library=tf_keras)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [dict(batch=1, model=2), dict(batch=2, model=1), dict(model=4)]
)
@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_meshes_of_other_shapes(name, sizes):
    make, x, axes = CASES[name]
    assert_trains_alike(make, x, axes, mesh_of(**sizes))


# The masks of Keras 3 depend only on seeds.
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "x", "axes"),
    [
        (lambda m: [m.LSTM(4, dropout=0.5, seed=3)], SERIES, OUT),
        (
            lambda m: [m.LSTM(4, dropout=0.5, recurrent_dropout=0.3, seed=3)],
            SERIES,
            OUT,
        ),
        (
            lambda m: [m.GRU(4, recurrent_dropout=0.3, seed=3)],
            SERIES,
            {**MIXED, "bias": (None, "model")},
        ),
        (
            lambda m: [m.ConvLSTM1D(2, 2, dropout=0.5, seed=3)],
            FRAMES[1],
            of_convolution(1, OUT),
        ),
    ],
    ids=["input", "recurrent", "GRU", "ConvLSTM1D"],
)
def test_each_device_drops_the_inputs_of_its_gates(make, x, axes):
    assert_trains_alike(make, x, axes)


@pytest.mark.exhaustive
def test_states_of_a_stateful_layer():
    def make():
        keras.utils.set_random_seed(3)
        inputs = keras.Input(batch_shape=(4, 3, 4))
        x, *states = L.LSTM(4, stateful=True, return_state=True)(inputs)
        return keras.Model(inputs, [x, *states])

    mesh = mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh, strict=True)
    for name, value in OUT.items():
        layout_map[f".*[.]{name}$"] = layout_of(mesh, *value)
    plain = make()
    with tlm.layout_map_scope(layout_map):
        model = make()
    model.set_weights(plain.get_weights())
    for one, other in zip(
        model.predict(SERIES, batch_size=4, verbose=0),
        plain.predict(SERIES, batch_size=4, verbose=0),
    ):
        np.testing.assert_allclose(one, other, **FLOAT64)


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("num_gates", [3, 4])
@pytest.mark.parametrize("count", [2, 4])
def test_products_of_gates_that_have_separate_inputs(num_gates, count):
    # With three gates, a device holds a part of a gate.
    mesh = mesh_of(model=count)
    xs = [RNG.normal(size=(2, 4)) for _ in range(num_gates)]
    weight = RNG.normal(size=(4, num_gates * 4))
    cell = gates._ShardedCell(mesh, None, (None, "model"), (None, "model"))
    with tlm.layout.default_mesh(mesh):
        found = tf.function(
            lambda weight, *xs: cell.products(
                xs, weight, (None, "model"), num_gates
            )
        )(
            transfer.to_mesh(weight, layout_of(mesh, None, "model")),
            *(transfer.to_replicated(x, mesh) for x in xs),
        )
    expected = [
        x @ part for x, part in zip(xs, np.split(weight, num_gates, axis=1))
    ]
    np.testing.assert_allclose(
        transfer.to_host(found), np.concatenate(expected, axis=1), rtol=1e-12
    )
    assert dtensor.fetch_layout(found).sharding_specs[1] == "model"


def test_cell_that_is_called_eagerly():
    mesh = mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh, strict=True)
    layout_map[".*kernel$"] = layout_of(mesh, None, "model")
    plain = L.LSTMCell(4)
    x, h, c = (RNG.normal(size=(4, 4)) for _ in range(3))
    expected = plain(x, [h, c])
    with tlm.layout_map_scope(layout_map):
        cell = L.LSTMCell(4)
        cell.build((None, 4))
    cell.set_weights(plain.get_weights())
    for one, other in zip(
        tf.nest.flatten(cell(x, [h, c])), tf.nest.flatten(expected)
    ):
        np.testing.assert_allclose(np.asarray(one), other, **FLOAT64)


def test_weights_that_cannot_be_sharded_are_gathered():
    mesh = mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh)
    layout_map[".*[./]kernel$"] = layout_of(mesh, "model", None, None)
    with tlm.layout_map_scope(layout_map):
        model = keras.Sequential(
            [keras.Input((2, 3, 4)), L.ConvLSTM1D(2, 2), L.Flatten()]
        )
    assert assignments.gathers_weights(model.layers[0].cell)
    plain = keras.Sequential(
        [keras.Input((2, 3, 4)), L.ConvLSTM1D(2, 2), L.Flatten()]
    )
    plain.set_weights(model.get_weights())
    np.testing.assert_allclose(
        model.predict(FRAMES[1], verbose=0),
        plain.predict(FRAMES[1], verbose=0),
        **FLOAT64,
    )
