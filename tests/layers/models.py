"""Small models with known gradients, and a dense reference in NumPy.

The loss of a sample is the sum over its positions of the looked-up row times a
row of `y`. The gradient of a table row is therefore the sum of
`y / num_samples` over all positions of its id.
"""

import keras
import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm

NUM_ROWS, DIM = 10, 2
LENGTH, NUM_SAMPLES = 3, 4
LEARNING_RATE = 0.5


@keras.saving.register_keras_serializable("tests")
def weighted_sum(y, rows):
    return keras.ops.sum(keras.ops.cast(rows, y.dtype) * y, axis=(1, 2))


def start_rows():
    return np.arange(NUM_ROWS * DIM, dtype=np.float32).reshape(NUM_ROWS, DIM)


@keras.saving.register_keras_serializable("tests")
def initializer(shape, dtype=None, partition_shape=None, partition_offset=None):
    """Returns the slice of `start_rows` for one shard."""
    del dtype
    rows = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    start = partition_offset[0]
    return rows[start : start + partition_shape[0]]


def assert_same_tables(first, second):
    """Checks that two layers have bitwise equal rows, slots and step counts."""
    np.testing.assert_array_equal(
        first.embeddings.numpy(), second.embeddings.numpy()
    )
    assert first.optimizer.slots.keys() == second.optimizer.slots.keys()
    for name, slot in first.optimizer.slots.items():
        np.testing.assert_array_equal(
            slot.numpy(), second.optimizer.slots[name].numpy(), err_msg=name
        )
    assert first.optimizer.iterations.numpy() == (
        second.optimizer.iterations.numpy()
    )


def settings(rule):
    """Returns optimizer settings whose values are exact in binary."""
    config = tf.tpu.experimental.embedding
    return {
        "sgd": config.SGD(LEARNING_RATE),
        "adagrad": config.Adagrad(LEARNING_RATE, 0.25),
    }[rule]


def make_layer(optimizer, num_shards=3, **kwargs):
    return tlm.layers.ShardedEmbedding(
        NUM_ROWS,
        DIM,
        num_shards=num_shards,
        optimizer=optimizer,
        embeddings_initializer=initializer,
        **{"name": "words", **kwargs},
    )


def make_model(optimizer, num_shards=3, **kwargs):
    """Returns a model with one embedding layer, and the layer."""
    ids = keras.Input([LENGTH], dtype="int64")
    layer = make_layer(optimizer, num_shards, **kwargs)
    return keras.Model(ids, layer(ids)), layer


def batches(num_batches, seed=1):
    """Returns ids with repetitions, and integer gradients of the rows."""
    rng = np.random.default_rng(seed)
    num_samples = num_batches * NUM_SAMPLES
    ids = rng.integers(0, NUM_ROWS, (num_samples, LENGTH))
    ids[::2, 1] = ids[::2, 0]
    y = rng.integers(-4, 5, (num_samples, LENGTH, DIM)).astype(np.float32)
    return ids, y


class DenseReference:
    """A table that is trained with dense gradients in NumPy."""

    def __init__(self, rule, rows=None, initial_accumulator=0.25):
        self.rule = rule
        self.rows = start_rows() if rows is None else rows
        self.accumulators = np.full_like(self.rows, initial_accumulator)

    def step(self, ids, row_gradients, learning_rate=LEARNING_RATE):
        gradient = np.zeros_like(self.rows)
        np.add.at(gradient, ids, row_gradients)
        if self.rule == "adagrad":
            self.accumulators += gradient * gradient
            gradient = gradient / np.sqrt(self.accumulators)
        self.rows = self.rows - np.float32(learning_rate) * gradient

    def fit(self, ids, y):
        for start in range(0, len(ids), NUM_SAMPLES):
            batch = slice(start, start + NUM_SAMPLES)
            self.step(ids[batch], y[batch] / NUM_SAMPLES)


def assert_trained(layer, ref):
    rows = layer.embeddings.numpy()
    if ref.rule == "sgd":  # Integers divided by powers of two are exact.
        np.testing.assert_array_equal(rows, ref.rows)
        return
    # The layer and the reference evaluate the square root and the quotient in a
    # different order.
    np.testing.assert_allclose(rows, ref.rows, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(
        layer.optimizer.accumulators.numpy(), ref.accumulators, rtol=2e-6
    )
