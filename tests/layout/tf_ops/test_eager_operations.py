"""Eager operations that DTensor refuses give what one device gives."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout import pairs
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout.tf_ops import eager_operations

L = keras.layers
MESH = mesh_of(batch=2, model=2)


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch):
    monkeypatch.setattr(eager_operations, "_told", set())


def images(*axes):
    return tlm.layout.to_mesh(pairs.IMAGES[:8], layout_of(MESH, *axes))


USES = {
    "resize": lambda x: tf.image.resize(x, (4, 4)),
    "split": lambda x: tf.split(x, 2, axis=1)[1],
    "convolution": lambda x: tf.nn.conv2d(x, tf.ones([3, 3, 3, 2]), 2, "SAME"),
}


@pytest.mark.parametrize("name", USES)
@pytest.mark.filterwarnings("ignore:DTensor cannot divide an eager")
def test_operations_and_their_gradients(name):
    def both(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = USES[name](x)
            loss = tf.reduce_sum(y ** 2)
        return y, tape.gradient(loss, x)

    plain = both(tf.constant(pairs.IMAGES[:8]))
    with tlm.layout.default_mesh(MESH):
        on_mesh = both(images("batch", "model", None, None))
    pairs.assert_alike(*[
        [np.asarray(x) for x in plain],
        [tlm.layout.to_host(x) for x in on_mesh]])


def test_it_is_said_once_for_each_operation():
    x = images("batch", "model", None, None)
    with pytest.warns(tlm.layout.LayoutMapWarning,
                      match=r"eager Split operation \('tf.Split' op"):
        USES["split"](x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", tlm.layout.LayoutMapWarning)
        USES["split"](x)


def test_other_errors_are_as_they_were():
    with pytest.raises(tf.errors.OpError, match="(?i)split"):
        tf.split(images("batch", None, None, None), 3, axis=1)


def test_a_strict_map_refuses():
    class Halves(L.Layer):
        def call(self, x):
            return tf.split(x, 2, axis=-1)[0]

    def of_map(strict):
        layout_map = tlm.LayoutMap(MESH, strict=strict)
        layout_map["d1.kernel"] = layout_of(MESH, None, "model")
        with tlm.layout_map_scope(layout_map):
            return keras.Sequential([
                keras.Input((8,)), L.Dense(16, name="d1"), Halves()])

    with pytest.warns(tlm.layout.LayoutMapWarning, match="Split"):
        of_map(False)(pairs.FEATURES)
    with pytest.raises(tf.errors.OpError, match="'tf.Split' op"):
        of_map(True)(pairs.FEATURES)
