"""Checks that tf_keras layers draw the random numbers of a single device."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm
from tests.layout.meshes import layout_of, mesh_of

layers = tf_keras.layers

RNG = np.random.default_rng(0)
SERIES = RNG.normal(size=(10, 5, 4)).astype(np.float32)
LABELS = RNG.normal(size=(10, 1)).astype(np.float32)
MESHES = [{"batch": 1, "model": 2}, {"batch": 2, "model": 2}]

each_mesh = pytest.mark.parametrize("sizes", MESHES, ids=["batch1", "batch2"])


def model_with(*middle):
    return tf_keras.Sequential(
        [
            tf_keras.Input((5, 4)),
            layers.Dense(8, name="d1"),
            *middle,
            layers.Flatten(),
            layers.Dense(1, name="d2"),
        ]
    )


def made(make, sizes):
    """Returns a model; on a mesh if `sizes` is not None."""
    tf_keras.utils.set_random_seed(7)
    if sizes is None:
        return make()
    mesh = mesh_of(**sizes)
    layout_map = tlm.LayoutMap(mesh)
    layout_map["d1.kernel"] = layout_of(mesh, None, "model")
    with tlm.layout_map_scope(layout_map):
        return make()


def losses(model, size=4, epochs=2):
    """Trains on batches of `size` samples; the last batch may be smaller."""
    return model.fit(
        SERIES,
        LABELS,
        batch_size=size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
    ).history["loss"]


def assert_same(make, sizes, run):
    """Compares initial weights, and the losses that `run` returns."""
    first, second = made(make, None), made(make, sizes)
    for a, b in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    results = []
    for model in (first, second):
        model.compile("sgd", "mse")
        results.append(run(model))
    np.testing.assert_allclose(*results, rtol=1e-5)


RANDOM = {
    "Dropout": lambda **seed: layers.Dropout(0.5, **seed),
    "SpatialDropout1D": lambda **seed: layers.SpatialDropout1D(0.5, **seed),
    "GaussianNoise": lambda **seed: layers.GaussianNoise(0.5, **seed),
    "GaussianDropout": lambda **seed: layers.GaussianDropout(0.5, **seed),
    "AlphaDropout": lambda **seed: layers.AlphaDropout(0.5, **seed),
}


@pytest.mark.covering(1, 1)
@each_mesh
@pytest.mark.parametrize("seed", [{}, {"seed": 3}], ids=["global", "seed"])
@pytest.mark.parametrize("name", RANDOM)
def test_layer_draws_the_numbers_of_a_single_device(name, seed, sizes):
    assert_same(lambda: model_with(RANDOM[name](**seed)), sizes, losses)


RECURRENT = {
    # The masks are drawn before the loop.
    "GRU": lambda: layers.GRU(6, dropout=0.3),
    # The masks are drawn in each step of the loop.
    "SimpleRNN": lambda: layers.SimpleRNN(6, recurrent_dropout=0.3),
    "LSTM": lambda: layers.LSTM(4, recurrent_dropout=0.3),
    "Bidirectional": lambda: layers.Bidirectional(
        layers.SimpleRNN(4, recurrent_dropout=0.3)
    ),
    "StackedRNNCells": lambda: layers.RNN(
        layers.StackedRNNCells(
            [
                layers.SimpleRNNCell(4),
                layers.SimpleRNNCell(3, recurrent_dropout=0.3),
            ]
        )
    ),
    "unrolled": lambda: layers.LSTM(
        4, dropout=0.3, recurrent_dropout=0.3, unroll=True
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layer_draws_the_numbers_of_a_single_device(name):
    assert_same(lambda: model_with(RECURRENT[name]()), MESHES[1], losses)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layer",
    [
        lambda: layers.LSTM(4, dropout=0.3, recurrent_dropout=0.3),
        lambda: layers.Bidirectional(layers.GRU(4, recurrent_dropout=0.3)),
        lambda: layers.RNN(
            layers.StackedRNNCells([layers.LSTMCell(4, dropout=0.3)])
        ),
        lambda: tf_keras.Sequential(
            [
                layers.Reshape((5, 2, 2, 2)),
                layers.ConvLSTM2D(3, 2, dropout=0.3, recurrent_dropout=0.3),
            ]
        ),
    ],
    ids=["LSTM", "Bidirectional", "StackedRNNCells", "ConvLSTM2D"],
)
def test_recurrent_layer_with_dropout_has_the_weights_of_a_single_device(layer):
    first, second = (
        made(lambda: model_with(layer()), sizes) for sizes in (None, MESHES[1])
    )
    for a, b in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def evaluate_between(model):
    first = losses(model)
    model.evaluate(SERIES, LABELS, verbose=0)
    model.predict(SERIES, verbose=0)
    # One device traces the step again, because the batches have equal sizes.
    return first + losses(model, size=5)


def train_on_batches(model):
    return [
        model.train_on_batch(SERIES[:size], LABELS[:size])
        for size in (4, 4, 6, 2, 4)
    ]


def evaluate_first(model):
    model.evaluate(SERIES, LABELS, verbose=0)
    return losses(model)


def compile_again(model):
    first = losses(model)
    # With this optimizer, one device traces the first step only once.
    model.compile(model.optimizer, "mse")
    return first + losses(model)


@pytest.mark.exhaustive
@pytest.mark.covering(1, 1)
@pytest.mark.parametrize(
    "run", [evaluate_between, train_on_batches, evaluate_first, compile_again]
)
def test_seeded_layer_draws_the_numbers_of_a_single_device(run):
    assert_same(
        lambda: model_with(layers.Dropout(0.5, seed=3), layers.Dropout(0.3)),
        MESHES[1],
        run,
    )


@pytest.mark.exhaustive
def test_new_metrics_change_the_seeds_as_on_a_single_device():
    def run(model):
        first = losses(model)
        # One device traces the first step twice, because it creates a metric.
        model.compile(model.optimizer, "mse", metrics=["mae"])
        return first + losses(model)

    assert_same(lambda: model_with(layers.Dropout(0.5, seed=3)), MESHES[1], run)


class CustomStep(tf_keras.Model):
    """Subclassed model whose custom step adds noise to the inputs."""

    def __init__(self):
        super().__init__()
        self.d1 = layers.Dense(8)
        self.noise = layers.GaussianNoise(0.5, seed=5)
        self.dropout = layers.Dropout(0.5, seed=3)
        self.d2 = layers.Dense(1)

    def call(self, inputs, training=False):
        hidden = self.dropout(self.d1(inputs), training=training)
        return self.d2(hidden[:, 0])

    def train_step(self, data):
        x, y = data
        return super().train_step((self.noise(x, training=True), y))


@pytest.mark.exhaustive
def test_custom_step_draws_the_numbers_of_a_single_device():
    results = []
    for sizes in (None, MESHES[1]):
        model = made(CustomStep, sizes)
        model.compile("sgd", "mse")
        results.append(losses(model))
    np.testing.assert_allclose(*results, rtol=1e-5)


class Repeated(layers.Layer):
    """Adds noise in each step of a `tf.while_loop`."""

    def call(self, inputs):
        return tf.while_loop(
            lambda i, x: i < 3,
            # The numbers depend on `x`, so one device draws them in order.
            lambda i, x: (i + 1, x + tf.random.normal(tf.shape(x))),
            (tf.constant(0), inputs),
        )[1]


@pytest.mark.exhaustive
def test_loop_draws_the_numbers_of_a_single_device():
    assert_same(lambda: model_with(Repeated()), MESHES[1], losses)
