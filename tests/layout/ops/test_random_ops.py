"""Checks that random ops draw the same numbers on a mesh and on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout import pairs
from tests.layout.meshes import mesh_of
from tests.layout.replication.test_replicated_ops import (
    COLUMNS,
    ApplyFunction,
    model_with,
)

_random = tf.random

# Each function draws random numbers for a batch of shape [n, 16].
DRAWS = {
    "normal": lambda x: x + _random.normal(tf.shape(x)),
    "normal, seeded": lambda x: x + _random.normal(tf.shape(x), seed=3),
    "truncated": lambda x: x + _random.truncated_normal([16]),
    "uniform": lambda x: x * _random.uniform(tf.shape(x)),
    "uniform, seeded": lambda x: x * _random.uniform([16], seed=5),
    "integers": lambda x: (
        x * tf.cast(_random.uniform([16], 0, 9, tf.int32), tf.float32)
    ),
    "gamma": lambda x: x * _random.gamma([16], 2.0),
    "poisson": lambda x: x * _random.poisson([16], 2.0),
    "categories": lambda x: (
        x[:, :3] * tf.cast(_random.categorical(x, 3), tf.float32)
    ),
    "shuffled": lambda x: x + _random.shuffle(tf.range(16.0)),
    "dropout": lambda x: tf.nn.dropout(x, 0.5),
    "stateless": lambda x: x + _random.stateless_normal(tf.shape(x), [1, 2]),
    "stateless uniform": lambda x: (
        x + _random.stateless_uniform(tf.shape(x), [1, 2])
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", DRAWS)
def test_model_with_random_ops_matches_a_single_device(name):
    pairs.assert_trains_alike(
        lambda: model_with(DRAWS[name]),
        pairs.FEATURES,
        COLUMNS,
        run_eagerly=False,
    )


DRAWN_WITHOUT_INPUT = {
    "RandomStandardNormal": lambda: _random.normal([64]),
    "RandomUniform": lambda: _random.uniform([64]),
    "RandomUniformInt": lambda: _random.uniform([64], 0, 99, tf.int32),
    "TruncatedNormal": lambda: _random.truncated_normal([64]),
    "raw": lambda: tf.raw_ops.RandomUniform(shape=[64], dtype=tf.float32),
}


@pytest.mark.parametrize("name", DRAWN_WITHOUT_INPUT)
@pytest.mark.parametrize("traced", [True, False])
def test_all_devices_draw_the_same_numbers_without_a_seed(name, traced):
    mesh = mesh_of(batch=2, model=2)
    draw = (
        tf.function(DRAWN_WITHOUT_INPUT[name])
        if traced
        else DRAWN_WITHOUT_INPUT[name]
    )
    tf.random.set_seed(None)
    with tlm.layout.default_mesh(mesh):
        drawn = [tf.experimental.dtensor.unpack(draw()) for _ in range(2)]
    for parts in drawn:
        assert len(parts) == 4
        for part in parts[1:]:
            np.testing.assert_array_equal(part, parts[0])
    assert np.any(drawn[0][0] != drawn[1][0])


def test_random_ops_outside_of_a_mesh_are_unchanged():
    tf.random.set_seed(7)
    first = _random.uniform([4])
    tf.random.set_seed(7)
    with tlm.layout.default_mesh(mesh_of(batch=2)):
        pass
    np.testing.assert_array_equal(_random.uniform([4]), first)


def test_layer_with_random_ops_draws_new_numbers_in_each_call():
    keras.utils.set_random_seed(1)
    model = pairs.on_mesh(
        lambda: keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(16, name="d1"),
                ApplyFunction(DRAWS["normal"]),
            ]
        ),
        COLUMNS,
    )
    x = pairs.FEATURES[:8]
    assert np.any(model.predict(x, verbose=0) != model.predict(x, verbose=0))
