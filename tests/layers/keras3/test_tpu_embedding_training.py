"""Compares training of `tlm.layers.TPUEmbedding` with `keras.layers.Embedding`.

The tests run typical user programs with both layers. Rows repeat in the ids of
a batch.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding

NUM_ROWS, DIM, BATCH = 12, 4, 8
START = (
    np.random.default_rng(1).standard_normal((NUM_ROWS, DIM)).astype(np.float32)
)

# Stock layers sum the gradients of a row in a different order.
CLOSE = dict(rtol=1e-5, atol=1e-6)


def start(shape, shard_info=None, dtype=None):
    del shape, shard_info, dtype
    return tf.constant(START)


def tpu_layer(trainable=True):
    table = tpu.TableConfig(NUM_ROWS, DIM, start, combiner="sum", name="words")
    return tlm.layers.TPUEmbedding(
        tpu.FeatureConfig(table),
        tpu.SGD(0.5),
        trainable=trainable,
        name="embedding",
    )


def stock_layer(trainable=True):
    return keras.layers.Embedding(
        NUM_ROWS,
        DIM,
        keras.initializers.Constant(START),
        trainable=trainable,
        name="embedding",
    )


def rows_of(layer):
    if isinstance(layer, keras.layers.Embedding):
        return np.asarray(layer.embeddings)
    return layer.get_embedding_tables()["words"].numpy()


def dense(seed=1):
    return keras.layers.Dense(
        1, kernel_initializer=keras.initializers.RandomNormal(seed=seed)
    )


class WithoutTraining(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.embedding, self.top = layer, dense()

    def call(self, x):
        return self.top(self.embedding(x))


class WithTraining(WithoutTraining):
    def call(self, x, training=None):
        return self.top(self.embedding(x, training=training))


class FineTuned(WithoutTraining):
    """Model that trains a layer to which it passes `training=False`."""

    def call(self, x):
        return self.top(self.embedding(x, training=False))


class Siamese(WithoutTraining):
    def call(self, x):
        one, other = self.embedding(x), self.embedding((x * 5 + 1) % NUM_ROWS)
        return self.top(one * other)


class Nested(WithoutTraining):
    def __init__(self, layer):
        super().__init__(layer)
        self.inner = WithoutTraining(layer)

    def call(self, x):
        return self.inner(x) + self.top(tf.nn.relu(self.inner(x)))


class OwnStep(WithoutTraining):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, weights), weights)
        )
        return {"loss": loss}


class Twice(WithoutTraining):
    """Model that computes two losses from one lookup and a persistent tape."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            found = self(x)
            losses = [
                self.compute_loss(x, y, found),
                tf.reduce_mean(tf.abs(found)),
            ]
        weights = self.trainable_variables
        gradients = [tape.gradient(loss, weights) for loss in losses]
        self.optimizer.apply(
            [
                tf.convert_to_tensor(one) + 0.25 * tf.convert_to_tensor(other)
                for one, other in zip(*gradients)
            ],
            weights,
        )
        return {"loss": losses[0]}


class Branched(WithoutTraining):
    """Model that looks up rows in one branch of a `tf.cond`."""

    def call(self, x):
        return self.top(
            tf.cond(
                tf.reduce_sum(x) > -1,
                lambda: self.embedding(x),
                lambda: tf.zeros([tf.shape(x)[0], DIM]),
            )
        )


class Recomputed(WithoutTraining):
    def call(self, x):
        return self.top(tf.recompute_grad(self.embedding)(x))


def functional(layer):
    x = keras.Input([], dtype="int64")
    return keras.Model(x, dense()(layer(x)))


def sequential(layer):
    return keras.Sequential([keras.Input([], dtype="int64"), layer, dense()])


MODELS = [
    WithoutTraining,
    WithTraining,
    FineTuned,
    Siamese,
    Nested,
    OwnStep,
    Twice,
    Branched,
    functional,
    sequential,
]


def batches(num_batches=3):
    rng = np.random.default_rng(2)
    return (
        rng.integers(0, NUM_ROWS, num_batches * BATCH),
        rng.standard_normal((num_batches * BATCH, 1)).astype(np.float32),
    )


def fit(make, layer, **options):
    model = make(layer)
    model.compile(keras.optimizers.SGD(0.5), "mse", **options)
    x, y = batches()
    history = model.fit(
        x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0
    )
    return model, history.history["loss"]


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("make", MODELS)
def test_fit_trains_as_with_a_stock_layer(make, run_eagerly):
    expected, losses = fit(make, stock_layer(), run_eagerly=run_eagerly)
    model, found = fit(make, tpu_layer(), run_eagerly=run_eagerly)
    np.testing.assert_allclose(found, losses, **CLOSE)
    layer = model.get_layer("embedding")
    assert np.any(rows_of(layer) != START)
    np.testing.assert_allclose(
        rows_of(layer), rows_of(expected.get_layer("embedding")), **CLOSE
    )
    # Several calls of the layer in one step result in one update.
    assert layer.embedding.stats()["num_updates"] == 6
    x, y = batches()
    np.testing.assert_allclose(
        model.evaluate(x, y, verbose=0),
        expected.evaluate(x, y, verbose=0),
        **CLOSE,
    )


def test_a_recomputed_lookup_trains():
    expected, losses = fit(Recomputed, stock_layer(), run_eagerly=True)
    model, found = fit(Recomputed, tpu_layer(), run_eagerly=True)
    np.testing.assert_allclose(found, losses, **CLOSE)
    np.testing.assert_allclose(
        rows_of(model.embedding), rows_of(expected.embedding), **CLOSE
    )


def open_lookups(layer):
    found = layer.embedding._state.backend.engine.describe()
    return found["open"], found["followed"]


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("make", MODELS)
def test_evaluation_and_prediction_enqueue_nothing(make):
    layer = tpu_layer()
    model = make(layer)
    model.compile(keras.optimizers.SGD(0.5), "mse")
    x, y = batches()
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    model(x)
    assert open_lookups(layer) == ([0], [0])
    assert layer.embedding.stats()["features"]["feature"]["num_samples"] == 0


def own_loop(layer, as_function, **call):
    top, optimizer = dense(), keras.optimizers.SGD(0.5)
    losses = []

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((top(layer(x, **call)) - y) ** 2)
        weights = layer.trainable_variables + top.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    x, y = batches()
    layer(x[:BATCH])
    top.build([None, DIM])
    optimizer.build(layer.trainable_variables + top.trainable_variables)
    if as_function:
        step = tf.function(step)
    for first in range(0, len(x), BATCH):
        losses.append(
            float(
                step(
                    tf.constant(x[first : first + BATCH]),
                    tf.constant(y[first : first + BATCH]),
                )
            )
        )
    return losses


@pytest.mark.covering(1)
@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize("call", [{}, {"training": True}, {"training": False}])
def test_a_custom_loop_trains_for_any_training_argument(call, as_function):
    expected, layer = stock_layer(), tpu_layer()
    losses = own_loop(expected, as_function)
    np.testing.assert_allclose(
        own_loop(layer, as_function, **call), losses, **CLOSE
    )
    np.testing.assert_allclose(rows_of(layer), rows_of(expected), **CLOSE)


def accumulate(layer, clip):
    """Runs two steps that apply the summed gradients of three batches each."""
    optimizer = keras.optimizers.SGD(0.5)
    x, y = batches(6)
    layer(x[:1])
    optimizer.build(layer.trainable_variables)
    [weight] = layer.trainable_variables
    total = None
    for step in range(6):
        here = slice(step * BATCH, (step + 1) * BATCH)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((layer(x[here]) - y[here]) ** 2)
        gradient = tf.convert_to_tensor(tape.gradient(loss, weight.value))
        if clip and step == 4:
            continue
        total = gradient if total is None else total + gradient
        if step % 3 == 2:
            optimizer.apply([total / 3], [weight])
            total = None


@pytest.mark.parametrize("leaves_out", [False, True])
def test_manually_summed_gradients_are_applied_in_one_step(leaves_out):
    expected, layer = stock_layer(), tpu_layer()
    accumulate(expected, leaves_out)
    accumulate(layer, leaves_out)
    np.testing.assert_allclose(rows_of(layer), rows_of(expected), **CLOSE)
    assert layer.embedding.stats()["num_updates"] == 2


def test_applying_or_differentiating_an_expired_lookup_raises():
    layer, optimizer = tpu_layer(), keras.optimizers.SGD(0.5)
    x = tf.constant([1, 2])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(x))
    weights = layer.trainable_variables
    gradients = tape.gradient(loss, weights)
    before = rows_of(layer)
    for _ in range(2):
        optimizer.apply(gradients, weights)
    # Both ids occur once, and their gradients are 1.
    np.testing.assert_allclose(rows_of(layer)[1:3], before[1:3] - 1, **CLOSE)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(x))
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="already applied.*'words'"
    ):
        optimizer.apply(gradients, weights)
    with tf.GradientTape():
        for _ in range(70):
            layer(x)
    with pytest.raises(
        tf.errors.FailedPreconditionError,
        match="Lookup 2 .*has expired.*64 newer",
    ):
        tape.gradient(loss, weights)
    assert max(open_lookups(layer)[0]) == 64


class Unused(WithoutTraining):
    """Model that looks up rows and ignores the result."""

    def call(self, x):
        self.embedding(x)
        return self.top(tf.cast(x, tf.float32)[:, tf.newaxis])


class Stopped(WithoutTraining):
    def call(self, x):
        return self.top(tf.stop_gradient(self.embedding(x)))


class OutsideOfTheTape(OwnStep):
    def train_step(self, data):
        x, y = data
        found = self.embedding(x)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self.top(found))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, weights), weights)
        )
        return {"loss": loss}


def sharded():
    return tlm.layers.ShardedEmbedding(
        NUM_ROWS,
        DIM,
        embeddings_initializer="ones",
        optimizer="sgd",
        name="embedding",
    )


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("layer", [tpu_layer, sharded])
@pytest.mark.parametrize("make", [Unused, Stopped, OutsideOfTheTape])
def test_a_table_without_a_gradient_raises(make, layer):
    layer = layer()
    layer.build()
    with pytest.raises(ValueError, match="'embedding|/embedding") as error:
        fit(make, layer)
    for words in (
        "got no gradient",
        "not called in this step",
        "`tf.stop_gradient`",
        "trainable = False",
    ):
        assert words in str(error.value)
    assert layer is not tpu_layer or "'words'" in str(error.value)


@pytest.mark.parametrize("layer", [tpu_layer, sharded])
def test_a_layer_that_is_not_trainable_requires_no_gradient(layer):
    layer = layer()
    layer.trainable = False
    layer.build()
    fit(Unused, layer)


def test_a_step_may_skip_a_table():
    layer, top = tpu_layer(), dense()
    optimizer = keras.optimizers.SGD(0.5)
    x, y = batches(1)
    layer(x)
    top.build([None, DIM])
    weights = layer.trainable_variables + top.trainable_variables
    optimizer.build(weights)
    for uses_layer in (False, True, False):
        before = rows_of(layer)
        with tf.GradientTape() as tape:
            found = layer(x) if uses_layer else tf.zeros([BATCH, DIM])
            loss = tf.reduce_mean((top(found) - y) ** 2)
        pairs = [
            (gradient, weight)
            for gradient, weight in zip(tape.gradient(loss, weights), weights)
            if gradient is not None
        ]
        optimizer.apply_gradients(pairs)
        assert np.any(rows_of(layer) != before) == uses_layer
