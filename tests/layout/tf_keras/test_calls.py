"""Checks tf_keras models and layers on a mesh that call a `tf.function`."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout.meshes import layout_of, mesh_of

# The scope supports tf_keras only if the program has imported it.
import tf_keras  # isort: skip

RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(8, 8)).astype(np.float32)
LABELS = np.ones([8, 4], np.float32)
PLACES = [{}, {"d1.kernel": (None, "model")}, {"d1.kernel": ("model", None)}]


class Projection(tf_keras.layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(8, 16), name="kernel")

    @tf.function
    def call(self, x):
        return x @ self.kernel


def sequential():
    return tf_keras.Sequential(
        [
            tf_keras.Input((8,)),
            Projection(name="d1"),
            tf_keras.layers.Dense(4, name="d2"),
        ]
    )


class Subclassed(tf_keras.Model):
    def __init__(self):
        super().__init__()
        self.d1 = Projection()
        self.d2 = tf_keras.layers.Dense(4)

    def call(self, x):
        return self.d2(self.d1(x))


class FunctionModel(Subclassed):
    @tf.function
    def call(self, x):
        return self.d2(self.d1(x))


def results(make, first, run_eagerly):
    """Returns trained weights, and predictions with assigned weights."""
    tf_keras.utils.set_random_seed(3)
    model = make()
    if first == "call":
        model(FEATURES)
    model.compile("sgd", "mse", run_eagerly=run_eagerly)
    model.fit(FEATURES, LABELS, epochs=2, verbose=0)
    trained = model.get_weights()
    model.set_weights([np.ones(w.shape) for w in model.weights])
    return [*trained, model(FEATURES), model.predict(FEATURES, verbose=0)]


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("first", ["fit", "call"])
@pytest.mark.parametrize("axes", PLACES)
@pytest.mark.parametrize("make", [sequential, Subclassed, FunctionModel])
def test_functions_of_layers_match_a_single_device(
    make, axes, first, run_eagerly
):
    mesh = mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh)
    for key, value in axes.items():
        layout_map[key] = layout_of(mesh, *value)

    def on_mesh():
        with tlm.layout_map_scope(layout_map):
            return make()

    expected = results(make, first, True)
    for a, b in zip(
        expected, results(on_mesh, first, run_eagerly), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
