"""Checks that random layers draw the same numbers with and without a mesh."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.layout import pairs
from tests.layout.keras3.test_layers import HEAD, stack
from tests.layout.meshes import axes_of, mesh_of
from tf_layoutmap.layout import default_mesh, to_host, to_mesh

L = keras.layers
dtensor = tf.experimental.dtensor
MESHES = [{"batch": 2, "model": 2}, {"batch": 1, "model": 4}]


def dropout():
    return pairs.sequential(
        (8,), L.Dense(16, activation="tanh", name="d1"), L.Dropout(0.5)
    )


def test_dropout_trains_as_on_a_single_device():
    model = pairs.assert_trains_alike(
        dropout, pairs.FEATURES, pairs.DENSE, epochs=4
    )
    assert axes_of(model.layers[0].kernel) == (None, "model")


def test_dropout_drops_at_its_rate_and_scales_the_rest():
    model = pairs.on_mesh(
        lambda: keras.Sequential(
            [keras.Input((1000,)), L.Dropout(0.25, seed=1)]
        ),
        {},
    )
    mesh = mesh_of(batch=2, model=2)
    step = tf.function(lambda x: model(x, training=True))
    with default_mesh(mesh):
        x = to_mesh(
            np.ones([8, 1000], np.float32),
            dtensor.Layout.batch_sharded(mesh, "batch", 2),
        )
        first, second = (to_host(step(x)) for _ in range(2))
    assert set(np.unique(first)) == {0, np.float32(1 / 0.75)}
    # 0.025 is five times the standard deviation of the mean of 8000 samples.
    assert abs(np.mean(first == 0) - 0.25) < 0.025
    assert np.any(first != second)
    # The shards have different random numbers.
    assert len({row.tobytes() for row in first}) == 8


@pytest.mark.covering(1, 1)
@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids="batch{0[batch]}".format)
@pytest.mark.parametrize(
    "layer",
    [
        lambda: L.GaussianNoise(0.1),
        lambda: L.GaussianDropout(0.2),
        lambda: L.AlphaDropout(0.2),
        lambda: L.SpatialDropout1D(0.3),
        lambda: L.Dropout(0.3, noise_shape=(None, 1, None)),
        # Biases are disabled, because the gradient of the key bias consists of
        # rounding errors.
        lambda: L.MultiHeadAttention(4, 2, dropout=0.2, use_bias=False),
    ],
    ids=[
        "GaussianNoise",
        "GaussianDropout",
        "AlphaDropout",
        "SpatialDropout1D",
        "noise_shape",
        "attention",
    ],
)
def test_random_layer_trains_as_on_a_single_device(layer, mesh):
    def make():
        x = inputs = keras.Input((6, 8))
        x = L.EinsumDense("abc,cd->abd", (6, 16), name="e")(x)
        random = layer()
        x = (
            random(x, x)
            if isinstance(random, L.MultiHeadAttention)
            else (random(x))
        )
        return keras.Model(inputs, L.Dense(4, name="d2")(L.Flatten()(x)))

    pairs.assert_trains_alike(
        make,
        pairs.SERIES,
        {"e.kernel": (None, "model"), **HEAD},
        mesh=mesh_of(**mesh),
    )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_recurrent_dropout_matches_a_single_device():
    pairs.assert_trains_alike(
        stack(
            (6, 8),
            lambda: L.LSTM(8, unroll=True, dropout=0.2, recurrent_dropout=0.2),
        ),
        pairs.SERIES,
        HEAD,
    )


def test_dropout_in_bfloat16_draws_the_same_mask():
    def make():
        return keras.Sequential(
            [keras.Input((64,)), L.Dropout(0.5, dtype="bfloat16")]
        )

    def train_step_of(model, put):
        step = tf.function(lambda x: model(x, training=True))
        return step(put(np.ones([8, 64], np.float32)))

    mesh = mesh_of(batch=2, model=2)
    plain = train_step_of(pairs.plain(make), tf.constant)
    with default_mesh(mesh):
        on_mesh = to_host(
            train_step_of(
                pairs.on_mesh(make, {}, mesh),
                lambda x: to_mesh(
                    x, dtensor.Layout.batch_sharded(mesh, "batch", 2)
                ),
            )
        )
    assert np.any(on_mesh == 0)
    np.testing.assert_array_equal(plain.numpy(), on_mesh)


class Drawing(L.Layer):
    """Layer that calls a function with its inputs and a seed generator."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.seed_generator = keras.random.SeedGenerator(5)

    def call(self, inputs):
        return self.function(inputs, self.seed_generator)


def _as_float(x):
    return keras.ops.cast(x, "float32")


_random = keras.random
DRAWS = {
    "normal": lambda x, seed: x + _random.normal(x.shape[1:], seed=seed),
    "truncated_normal": lambda x, seed: (
        x + _random.truncated_normal((8,), seed=seed)
    ),
    "uniform": lambda x, seed: (
        x * _random.uniform(keras.ops.shape(x), seed=seed)
    ),
    "randint": lambda x, seed: (
        x * _as_float(_random.randint((8,), 0, 5, seed=seed))
    ),
    "categorical": lambda x, seed: (
        x[:, :3] * _as_float(_random.categorical(x, 3, seed=seed))
    ),
    "shuffle": lambda x, seed: _random.shuffle(x, seed=seed),
    "gamma": lambda x, seed: x * _random.gamma((8,), 2.0, seed=seed),
    "binomial": lambda x, seed: x * _random.binomial((8,), 5.0, 0.3, seed=seed),
    "beta": lambda x, seed: x * _random.beta((8,), 2.0, 3.0, seed=seed),
    "dropout": lambda x, seed: _random.dropout(x, 0.5, seed=seed),
    "no seed": lambda x, seed: x + _random.normal((8,)),
    "tf.random": lambda x, seed: x + tf.random.normal(tf.shape(x)),
}
AUGMENTATIONS = {
    "RandomFlip": lambda: L.RandomFlip(seed=1),
    "RandomRotation": lambda: L.RandomRotation(0.2, seed=1),
    "RandomContrast": lambda: L.RandomContrast(0.3, seed=1),
    "RandomBrightness": lambda: L.RandomBrightness(0.3, seed=1),
    "RandomTranslation": lambda: L.RandomTranslation(0.2, 0.2, seed=1),
}
SMALL_IMAGES = np.random.default_rng(0).uniform(0, 255, (10, 4, 4, 3))


def assert_draws_alike(layer, x, rate, sizes):
    """Compares the losses of batches of 4, 4 and 2 samples."""

    def make():
        return keras.Sequential(
            [
                keras.Input(x.shape[1:]),
                layer(),
                L.Flatten(),
                L.Dense(8, name="d1"),
                L.Dense(1, name="d2"),
            ]
        )

    histories = []
    for model in (
        pairs.plain(make),
        pairs.on_mesh(make, {"d1.kernel": (None, "model")}, mesh_of(**sizes)),
    ):
        keras.utils.set_random_seed(4)
        model.compile(keras.optimizers.SGD(rate), "mse", jit_compile=False)
        y = x.reshape(len(x), -1)[:, :1]
        options = dict(batch_size=4, epochs=2, shuffle=False, verbose=0)
        histories.append(model.fit(x, y, **options).history["loss"])
    np.testing.assert_allclose(*histories, rtol=1e-5)


SMALL_MESHES = [{"batch": 1, "model": 2}, {"batch": 2, "model": 2}]


@pytest.mark.covering(1, 1)
@pytest.mark.filterwarnings("ignore:To ")
@pytest.mark.parametrize("sizes", SMALL_MESHES, ids="batch{0[batch]}".format)
@pytest.mark.parametrize("name", DRAWS)
def test_keras_random_draws_the_numbers_of_a_single_device(name, sizes):
    assert_draws_alike(
        lambda: Drawing(DRAWS[name]), pairs.FEATURES[:10], 0.01, sizes
    )


@pytest.mark.covering(1, 1)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:To ")
@pytest.mark.parametrize("sizes", SMALL_MESHES, ids="batch{0[batch]}".format)
@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_augmentation_draws_the_numbers_of_a_single_device(name, sizes):
    assert_draws_alike(
        AUGMENTATIONS[name], SMALL_IMAGES.astype(np.float32), 1e-7, sizes
    )
