"""Programs with ragged inputs get the results of calls as in TensorFlow."""

import unittest.mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tf_layoutmap._core import function_traces, patches

tpu = tf.tpu.experimental.embedding
NUM_ROWS = (20, 9, 13)


@pytest.fixture(autouse=True, scope="module")
def _patches():
    patches.ensure("function_calls")


def start(shape, dtype=tf.float32):
    size = int(np.prod(shape))
    return tf.reshape(tf.cast(tf.range(size) % 13 - 6, dtype), shape)


def feature_config():
    return {
        name: tpu.FeatureConfig(
            tpu.TableConfig(size, 4, start, combiner=combiner, name=name)
        )
        for name, size, combiner in zip(
            "cab", NUM_ROWS, ("mean", "sum", "sqrtn")
        )
    }


def batch(seed, num_samples=4, dtype=tf.int64, most=3):
    rng = np.random.default_rng(seed)
    return {
        name: tf.RaggedTensor.from_row_lengths(
            tf.constant(rng.integers(0, size, sizes.sum()), dtype), sizes
        )
        for name, size, sizes in (
            (name, size, rng.integers(0, most + 1, num_samples))
            for name, size in zip("cab", NUM_ROWS)
        )
    }


def weights_of(features):
    rng = np.random.default_rng(3)
    return {
        name: None
        if name == "a"
        else ids.with_values(
            tf.constant(rng.uniform(1, 2, ids.values.shape[0]), tf.float32)
        )
        for name, ids in features.items()
    }


BATCHES = {
    "equal sizes": [batch(seed) for seed in range(4)],
    "other sizes": [batch(seed, 2 + seed % 2) for seed in range(4)],
    "int32": [batch(seed, dtype=tf.int32) for seed in range(3)],
    "int32 and int64": [
        batch(seed, dtype=(tf.int32, tf.int64)[seed % 2]) for seed in range(4)
    ],
    "batches without ids": [batch(seed, most=seed % 2) for seed in range(4)],
    "batches without samples": [batch(seed, seed % 2 * 3) for seed in range(4)],
    "one batch": [batch(1)] * 3,
}


class EmbeddingSteps:
    """Steps of `tlm.TPUEmbedding`; the tape is inside of the function."""

    def __init__(self, run, weighted):
        self._embedding = tlm.TPUEmbedding(feature_config(), tpu.Adagrad(0.5))
        self._weighted = weighted
        self._step = run(self._step)
        self._look_up = run(self._look_up)

    def _step(self, features, weights):
        self._embedding.enqueue(features, weights)
        with tf.GradientTape() as tape:
            found = self._embedding.dequeue()
            tape.watch(found)
            loss = sum(tf.reduce_sum(x * x) for x in tf.nest.flatten(found))
        self._embedding.apply_gradients(tape.gradient(loss, found))
        return found

    def _look_up(self, features, weights, training):
        self._embedding.enqueue(features, weights, training=training)
        return self._embedding.dequeue()

    def __call__(self, features):
        weights = weights_of(features) if self._weighted else None
        return [
            self._look_up(features, weights, False),
            self._step(features, weights),
            self._look_up(features, weights, training=False),
            self._embedding(features, weights),
        ]

    def tables(self):
        return self._embedding.embedding_tables


class LayerSteps:
    """Steps of a layer; the tape is outside of the function."""

    def __init__(self, run, weighted):
        self._layer = tlm.layers.TPUEmbedding(
            feature_config(), tpu.Adagrad(0.5)
        )
        self._optimizer = keras.optimizers.SGD(0.5)
        self._weighted = weighted
        self._call = run(self._call)

    def _call(self, features, weights):
        return self._layer(features, weights)

    def __call__(self, features):
        weights = weights_of(features) if self._weighted else None
        first = self._call(features, weights)
        with tf.GradientTape() as tape:
            found = self._call(features, weights)
            loss = sum(tf.reduce_sum(x * x) for x in tf.nest.flatten(found))
        trained = self._layer.trainable_variables
        self._optimizer.apply(tape.gradient(loss, trained), trained)
        return [first, found, self._call(features, weights)]

    def tables(self):
        return self._layer.embedding_tables


class ShardedSteps:
    """Steps of layers with one table; some steps do not train a layer."""

    def __init__(self, run, weighted):
        del weighted
        self._layers = {
            name: tlm.layers.ShardedEmbedding(
                size, 4, embeddings_initializer=start, optimizer="adagrad"
            )
            for name, size in zip("cab", NUM_ROWS)
        }
        self._optimizer = keras.optimizers.SGD(0.5)
        self._call = run(self._call)
        self._num_steps = 0

    def _call(self, features):
        return {
            name: tf.reduce_sum(self._layers[name](ids), axis=1)
            for name, ids in features.items()
        }

    def __call__(self, features):
        first = self._call(features)
        # The result depends on the tape and on `trainable`.
        self._layers["a"].trainable = self._num_steps != 1
        self._num_steps += 1
        with tf.GradientTape() as tape:
            found = self._call(features)
            loss = sum(tf.reduce_sum(x * x) for x in tf.nest.flatten(found))
        trained = [
            variable
            for layer in self._layers.values()
            for variable in layer.trainable_variables
        ]
        self._optimizer.apply(tape.gradient(loss, trained), trained)
        return [first, found, self._call(features)]

    def tables(self):
        return {name: layer.embeddings for name, layer in self._layers.items()}


PROGRAMS = [EmbeddingSteps, LayerSteps, ShardedSteps]
RUNS = {
    "function": tf.function,
    "relaxed function": lambda call: tf.function(call, reduce_retracing=True),
    "function in a function": lambda call: tf.function(tf.function(call)),
    "eager": lambda call: call,
}


def results(make, batches, run, weighted, *, is_stock):
    """Returns the results of all steps, and the tables afterwards."""
    with unittest.mock.patch.object(
        function_traces,
        "_read",
        (lambda *arguments: False) if is_stock else function_traces._read,
    ):
        steps = make(run, weighted)
        found = [
            [x.numpy() for x in tf.nest.flatten(steps(features))]
            for features in batches
        ]
        return found, [np.asarray(x) for x in steps.tables().values()]


@pytest.mark.covering(2)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("make", PROGRAMS)
def test_steps_are_bitwise_equal(make, batches, run, weighted):
    if make is ShardedSteps and weighted:
        pytest.skip("A ShardedEmbedding has no weights.")
    expected, found = (
        results(make, batches * 2, run, weighted, is_stock=is_stock)
        for is_stock in (True, False)
    )
    for step in range(len(expected[0])):
        for one, other in zip(expected[0][step], found[0][step], strict=True):
            np.testing.assert_array_equal(one, other)
    for one, other in zip(expected[1], found[1], strict=True):
        np.testing.assert_array_equal(one, other)
    for table in found[1]:
        assert np.any(table != start(table.shape).numpy())
