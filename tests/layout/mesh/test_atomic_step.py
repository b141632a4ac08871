"""Checks that a step that fails in its backward pass writes nothing."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout import pairs
from tests.layout.meshes import layout_of, mesh_of

import tf_keras  # isort: skip - must be imported before the scope is used.

dtensor = tf.experimental.dtensor

X, Y = pairs.FEATURES[:8], pairs.LABELS[:8]
BAD = X.copy()
BAD[-1] = 1e6


@tf.custom_gradient
def with_failing_gradient(x):
    """Returns `x`. The gradient fails on devices that hold a large number."""

    def gradient(dy):
        ids = tf.cast(tf.reduce_max(x, axis=-1) > 1000.0, tf.int32) * 99
        return dy * tf.gather(tf.ones([4]), ids)[:, tf.newaxis]

    return tf.identity(x), gradient


def make(layers, base):
    class FailingGradient(base):
        def call(self, x):
            return with_failing_gradient(x)

    return [
        layers.Dense(16, activation="relu", name="d1"),
        FailingGradient(),
        layers.BatchNormalization(),
        layers.Dropout(0.2),
        layers.Dense(4, name="d2"),
    ]


def keras_model():
    return keras.Sequential(
        [keras.Input((8,)), *make(keras.layers, keras.layers.Layer)]
    )


def tf_keras_model():
    return tf_keras.Sequential(
        [tf_keras.Input((8,)), *make(tf_keras.layers, tf_keras.layers.Layer)]
    )


def on_mesh(function):
    mesh = mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh)
    layout_map["d1.kernel"] = layout_of(mesh, None, "model")
    keras.utils.set_random_seed(3)
    with tlm.layout_map_scope(layout_map):
        return function(), mesh


def shards_of(variables):
    """Returns the shards of all variables in one list."""
    found = []
    for variable in variables:
        value = getattr(variable, "value", variable)
        value = value if hasattr(value, "read_value") else variable
        found += [part.numpy() for part in dtensor.unpack(value.read_value())]
    return found


def assert_unchanged(before, variables):
    for a, b in zip(before, shards_of(variables), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.exhaustive
def test_failed_step_of_keras_fit_writes_nothing():
    model, _ = on_mesh(keras_model)
    model.compile(
        keras.optimizers.AdamW(0.03, use_ema=True),
        pairs.loss(),
        metrics=["accuracy"],
    )
    model.train_on_batch(X, Y)
    # These include statistics, seeds, slot variables, moving averages, counters
    # and metrics.
    variables = [
        *model.variables,
        *model.optimizer.variables,
        *model.metrics_variables,
    ]
    model.reset_metrics()
    before = shards_of(variables)
    with pytest.raises(tf.errors.InvalidArgumentError, match="99 is not in"):
        model.train_on_batch(BAD, Y)
    assert_unchanged(before, variables)
    losses = [model.train_on_batch(X, Y)[0] for _ in range(8)]
    assert losses[-1] < losses[0]


def test_failed_step_of_tf_keras_fit_writes_nothing():
    model, _ = on_mesh(tf_keras_model)
    model.compile(
        tf_keras.optimizers.AdamW(0.03, use_ema=True),
        tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.train_on_batch(X, Y)
    variables = [*model.weights, *model.optimizer.variables]
    before = shards_of(variables)
    with pytest.raises(tf.errors.InvalidArgumentError, match="99 is not in"):
        model.train_on_batch(BAD, Y)
    assert_unchanged(before, variables)
    losses = [model.train_on_batch(X, Y) for _ in range(8)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "run",
    [tf.function(autograph=False), lambda step: step],
    ids=["traced", "eager"],
)
def test_failed_step_of_a_custom_loop_writes_nothing(run):
    model, mesh = on_mesh(keras_model)
    optimizer = keras.optimizers.AdamW(0.01)
    optimizer.build(model.trainable_variables)

    @run
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x))
            )
        optimizer.apply_gradients(
            zip(
                tape.gradient(loss, model.trainable_variables),
                model.trainable_variables,
            )
        )
        return loss

    def train(x):
        with tlm.layout.default_mesh(mesh):
            return float(
                tlm.layout.to_host(
                    step(
                        tlm.layout.to_mesh(x, layout_of(mesh, "batch", None)),
                        tlm.layout.to_mesh(Y, layout_of(mesh, "batch")),
                    )
                )
            )

    first = train(X)
    variables = [*model.trainable_variables, *optimizer.variables]
    before = shards_of(variables)
    with pytest.raises(tf.errors.OpError):
        train(BAD)
    assert_unchanged(before, variables)
    assert train(X) < first


class TwoSteps(keras.Model):
    """Model whose step has two phases and reads values it has written."""

    def __init__(self):
        super().__init__()
        self.d1 = keras.layers.Dense(16, name="d1")
        self.d2 = keras.layers.Dense(4, name="d2")
        self.calls = self.add_weight(shape=(), trainable=False, name="calls")
        self.second = keras.optimizers.Adam(0.01)

    def call(self, x):
        self.calls.assign_add(1.0)
        return self.d2(keras.ops.relu(self.d1(x)) * self.calls)

    def train_step(self, data):
        x, y = data
        for optimizer, layer in (
            (self.optimizer, self.d1),
            (self.second, self.d2),
        ):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x))
            variables = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        # The step also updates the bias directly. The gradient tape must watch
        # the next read of the bias.
        self.d2.bias.assign(self.d2.bias * 0.5)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x))
        self.d2.bias.assign_sub(0.1 * tape.gradient(loss, self.d2.bias))
        return {"loss": loss, "calls": self.calls + 0.0}


def test_values_written_in_a_step_are_read_later_in_the_step():
    models = []
    for wrap in (pairs.plain, lambda function: on_mesh(function)[0]):
        model = wrap(TwoSteps)
        model.compile(keras.optimizers.Adam(0.01), pairs.loss())
        models.append(
            (
                model,
                model.fit(
                    X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0
                ).history,
            )
        )
    pairs.assert_alike(models[0][1], models[1][1])
    pairs.assert_alike(*(model.get_weights() for model, _ in models))
