"""Checks models with host tensors in layers, losses, metrics and steps."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.layout import pairs

HELD = tf.constant(np.linspace(-1, 1, 64).reshape(8, 8), tf.float32)


class Positions(keras.layers.Layer):
    """Layer that stores tensors of several types in `__init__` and `build`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mask = keras.ops.arange(16 * 16) % 3 == 0
        self.half = tf.constant(np.arange(300) / 8, tf.float16)
        self.words = tf.constant(["a", "b"] * 100)

    def build(self, shape):
        self.ids = keras.ops.flip(keras.ops.arange(shape[-1]))
        self.table = keras.ops.reshape(
            keras.ops.arange(16 * 16, dtype="float32") / 100, (16, 16)
        )

    def call(self, x):
        x = keras.ops.take(x, self.ids, axis=1)
        mask = keras.ops.cast(self.mask[:16], x.dtype)
        return (
            keras.ops.matmul(x * mask, self.table)
            + keras.ops.cast(self.half[8], x.dtype)
            + keras.ops.cast(tf.size(self.words), x.dtype) / 200
        )


def normalization():
    return keras.layers.Normalization(
        mean=np.arange(8.0) / 8, variance=np.arange(1.0, 9.0)
    )


class Loss(keras.losses.Loss):
    def __init__(self):
        super().__init__()
        self.factors = tf.constant([0.5, 1.0, 1.5, 2.0])

    def call(self, y, logits):
        return pairs.loss()(y, logits * self.factors)


class Metric(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="weighted")
        self.total = self.add_weight(name="total", initializer="zeros")
        self.factors = tf.constant([0.5, 1.0, 1.5, 2.0])

    def update_state(self, y, logits, sample_weight=None):
        self.total.assign_add(
            keras.ops.sum(keras.ops.square(logits) * self.factors)
        )

    def result(self):
        return self.total * self.factors[2]


class CustomStep(keras.Sequential):
    def train_step(self, data):
        x, y = data
        return super().train_step((x @ HELD, y))


def model(*layers, of=keras.Sequential, after=()):
    return lambda: of(
        [
            keras.Input((8,)),
            *(make() for make in layers),
            keras.layers.Dense(16, activation="tanh", name="d1"),
            *(make() for make in after),
            keras.layers.Dense(4, name="d2"),
        ]
    )


CASES = {
    "layer": (model(after=[Positions]), {}),
    "stock layer": (model(normalization), {}),
    "closure": (model(lambda: keras.layers.Lambda(lambda x: x @ HELD)), {}),
    "loss": (model(), {"loss": Loss}),
    "metric": (model(), {"metrics": Metric}),
    "train_step": (model(of=CustomStep), {}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name, run_eagerly",
    [*((name, False) for name in CASES), ("layer", True), ("loss", True)],
)
def test_models_match_a_single_device(name, run_eagerly):
    make, parts = CASES[name]

    def history(model):
        model.compile(
            keras.optimizers.Adam(0.01),
            parts.get("loss", pairs.loss)(),
            metrics=[part() for part in [parts.get("metrics")] if part],
            run_eagerly=run_eagerly,
        )
        x, y = pairs.FEATURES, pairs.LABELS
        options = {"batch_size": 8, "verbose": 0}
        losses = []
        seen = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda _, logs: losses.append(logs)
        )
        model.fit(x, y, shuffle=False, callbacks=[seen], **options)
        assert len(losses) == 4
        return (
            losses,
            model.evaluate(x, y, **options),
            model.predict(x, **options),
            model(x).numpy(),
            model(x, training=True).numpy(),
        )

    plain, on_mesh = history(pairs.plain(make)), history(pairs.on_mesh(make))
    pairs.assert_alike(plain, on_mesh, rtol=1e-6, atol=2e-6)


def test_callback_can_compute_with_weights():
    seen = []

    def watch(model):
        return keras.callbacks.LambdaCallback(
            on_train_begin=lambda _: seen.append(
                float(keras.ops.sum(model.layers[0].kernel * tf.ones([8, 16])))
            )
        )

    for one in (pairs.plain(model()), pairs.on_mesh(model())):
        pairs.fit(one, epochs=1, callbacks=[watch(one)])
    assert seen[0] == pytest.approx(seen[1], 1e-5)


class Counts(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.calls = tf.Variable(0, name="calls")

    def call(self, x):
        self.calls.assign_add(1)
        return x


def test_host_variable_is_updated_once_or_raises():
    on_mesh = pairs.on_mesh(model(Counts))
    on_mesh(pairs.FEATURES)
    assert on_mesh.layers[0].calls.numpy() == 1
    with pytest.raises(RuntimeError, match=r"(?s)Counts.*'calls:0'.*weight"):
        pairs.fit(on_mesh, epochs=1)
    assert on_mesh.layers[0].calls.numpy() == 1
