"""Checks the variables of tf_keras models on a mesh."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout.meshes import layout_of, mesh_of

# The scope supports tf_keras only if the program has imported it.
import tf_keras  # isort: skip

layers = tf_keras.layers
FEATURES = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
LABELS = np.ones([8, 4], np.float32)


def on_mesh(make, axes):
    mesh = mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh)
    for key, value in axes.items():
        layout_map[key] = layout_of(mesh, *value)
    tf_keras.utils.set_random_seed(3)
    with tlm.layout_map_scope(layout_map):
        return make()


class Subclassed(tf_keras.Model):
    def __init__(self):
        super().__init__(name="model")
        self.d1 = layers.Dense(16)
        self.norm = layers.BatchNormalization()
        self.d2 = layers.Dense(4)

    def call(self, x):
        return self.d2(self.norm(self.d1(x)))


def sequential():
    return tf_keras.Sequential(
        [
            tf_keras.Input((8,)),
            layers.Dense(16, name="d1"),
            layers.Dense(4, name="d2"),
        ]
    )


@pytest.mark.parametrize("make", [sequential, Subclassed])
def test_names_are_the_same_as_without_a_mesh(make):
    found = []
    for place in (lambda: make(), lambda: on_mesh(make, {})):
        tf_keras.backend.clear_session()
        model = place()
        optimizer = tf_keras.optimizers.AdamW()
        model.compile(optimizer, "mse", metrics=["mae"])
        model.fit(FEATURES, LABELS, verbose=0)
        variables = [*model.variables, *optimizer.variables]
        found.append([one.name for one in variables])
    assert found[0] == found[1]


class Product(layers.Layer):
    """Layer with a weight whose initializer returns an array of a dtype."""

    def __init__(self, dtype_of_array, shape=None, **options):
        super().__init__(name="d1")
        self.dtype_of_array, self.shape = dtype_of_array, shape
        self.options = options

    def build(self, shape):
        self.kernel = self.add_weight(
            shape=(8, 4),
            name="kernel",
            initializer=lambda shape, dtype=None: np.ones(
                self.shape or shape, self.dtype_of_array
            ),
            **self.options,
        )

    def call(self, x):
        return x @ self.kernel


def product(*args, **options):
    return lambda: tf_keras.Sequential(
        [tf_keras.Input((8,)), Product(*args, **options)]
    )


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("axes", [{}, {"d1.kernel": (None, "model")}])
@pytest.mark.parametrize("dtype", ["int64", "bool", "float64"])
def test_array_of_an_initializer_is_converted(dtype, axes):
    model = on_mesh(product(dtype), axes)
    (kernel,) = model.weights
    assert kernel.dtype == tf.float32
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(FEATURES, LABELS, verbose=0)
    assert np.abs(kernel.numpy() - 1).min() > 0


def test_wrong_shape_of_an_initializer_raises():
    with pytest.raises(
        ValueError,
        match=r"variable 'd1/kernel' must return a float32 tensor of shape "
        r"\(8, 4\). Received: a float32 tensor of shape \(1, 4\)",
    ):
        on_mesh(product("float32", (1, 4)), {})


def test_aggregation_is_kept():
    options = {"aggregation": tf.VariableAggregation.MEAN}
    (kernel,) = on_mesh(product("float32", **options), {}).weights
    assert kernel.aggregation == tf.VariableAggregation.MEAN
