"""Random operations of TensorFlow: on a mesh the numbers of one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import covering
from tests.layout import pairs
from tests.layout.meshes import mesh_of
from tests.layout.replication.test_replicated_ops import (
    COLUMNS,
    Uses,
    model_with,
)

_random = tf.random

# Each draws for a batch of [n, 16].
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


@pytest.mark.parametrize(
    "name",
    covering.but(
        DRAWS,
        "uniform",
        "uniform, seeded",
        "normal, seeded",
        "truncated",
        "integers",
        "poisson",
        "stateless uniform",
    ),
)
@pytest.mark.filterwarnings("ignore:To ")
def test_a_model_draws_and_trains_alike(name):
    pairs.assert_trains_alike(
        lambda: model_with(DRAWS[name]),
        pairs.FEATURES,
        COLUMNS,
        run_eagerly=False,
    )


DRAWN_ALONE = {
    "RandomStandardNormal": lambda: _random.normal([64]),
    "RandomUniform": lambda: _random.uniform([64]),
    "RandomUniformInt": lambda: _random.uniform([64], 0, 99, tf.int32),
    "TruncatedNormal": lambda: _random.truncated_normal([64]),
    "raw": lambda: tf.raw_ops.RandomUniform(shape=[64], dtype=tf.float32),
}


@pytest.mark.parametrize("name", DRAWN_ALONE)
@pytest.mark.parametrize("traced", [True, False])
def test_without_a_seed_all_devices_draw_the_same(name, traced):
    mesh = mesh_of(batch=2, model=2)
    draw = tf.function(DRAWN_ALONE[name]) if traced else DRAWN_ALONE[name]
    tf.random.set_seed(None)
    with tlm.layout.default_mesh(mesh):
        drawn = [tf.experimental.dtensor.unpack(draw()) for _ in range(2)]
    for parts in drawn:
        assert len(parts) == 4
        for part in parts[1:]:
            np.testing.assert_array_equal(part, parts[0])
    assert np.any(drawn[0][0] != drawn[1][0])


def test_outside_of_a_mesh_nothing_is_changed():
    tf.random.set_seed(7)
    first = _random.uniform([4])
    tf.random.set_seed(7)
    with tlm.layout.default_mesh(mesh_of(batch=2)):
        pass
    np.testing.assert_array_equal(_random.uniform([4]), first)


def test_a_layer_that_draws_predicts_other_numbers_each_time():
    keras.utils.set_random_seed(1)
    model = pairs.on_mesh(
        lambda: keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(16, name="d1"),
                Uses(DRAWS["normal"]),
            ]
        ),
        COLUMNS,
    )
    x = pairs.FEATURES[:8]
    assert np.any(model.predict(x, verbose=0) != model.predict(x, verbose=0))
