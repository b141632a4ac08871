"""Tests the registration of ops with tf.dtensor."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import tests.strategies  # noqa: F401  (splits the CPU before the first op)
from tests.dtensor.test_sharded_rows import on_mesh, to_numpy
from tests.layout import pairs
from tf_layoutmap._core import dtensor_ops
from tf_layoutmap.layout import LayoutMapWarning


@pytest.fixture(scope="module")
def mesh():
    return dtensor.create_mesh(
        [("batch", 2), ("model", 2)], devices=[f"CPU:{i}" for i in range(4)]
    )


def test_ops_can_be_registered_with_this_tensorflow():
    assert dtensor_ops.available()
    assert dtensor_ops.unavailable_reason() == ""


def test_an_elementwise_op_runs_on_each_shard_and_keeps_the_layout(mesh):
    dtensor_ops.register_op("Expint", "elementwise")
    x = np.linspace(0.1, 2, 32, dtype=np.float32).reshape(4, 8)
    specs = ["batch", "model"]

    @tf.function
    def f(x):
        return tf.math.special.expint(x)

    y = f(on_mesh(x, specs, mesh))
    assert dtensor.fetch_layout(y).sharding_specs == specs
    np.testing.assert_array_equal(
        to_numpy(y, mesh), tf.math.special.expint(x).numpy()
    )


def test_registering_an_op_with_another_policy_raises():
    dtensor_ops.register_op("Expint", "elementwise")
    with pytest.raises(ValueError, match="is registered with policy"):
        dtensor_ops.register_op("Expint", "replicated")


def test_registering_an_op_that_dtensor_supports_raises():
    with pytest.raises(RuntimeError, match="'Relu' already has an expander"):
        dtensor_ops.register_op("Relu", "elementwise")


def test_unknown_ops_and_policies_raise():
    with pytest.raises(ValueError, match="must be the name of a registered"):
        dtensor_ops.register_op("NoSuchOp", "elementwise")
    with pytest.raises(ValueError, match="`policy` must be one of"):
        dtensor_ops.register_op("Expint", "rowwise")


USES = {
    "Roll": lambda x: tf.roll(x, 1, 0),
    "MatrixDiagPartV3": lambda x: x + tf.linalg.diag_part(x),
    "MatrixDiagV3": lambda x: tf.reduce_sum(tf.linalg.diag(x), axis=-1),
    "MatrixSetDiagV3": lambda x: tf.linalg.set_diag(x, x[0]),
}


@pytest.mark.parametrize("name", USES)
def test_a_missing_op_is_replicated_and_warns_with_the_layer_name(name):
    class User(keras.layers.Layer):
        def call(self, x):
            return USES[name](x)

    def make():
        return keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(4, name="d1"),
                User(name="user"),
            ]
        )

    expected = pairs.plain(make).predict(pairs.FEATURES[:8], verbose=0)
    model = pairs.on_mesh(make, {"d1.kernel": (None, "model")})
    with pytest.warns(LayoutMapWarning, match=rf"{name} in layer 'user'"):
        predicted = model.predict(pairs.FEATURES[:8], verbose=0)
    pairs.assert_alike(predicted, expected)
