"""Tests that models and functions with tables of this package are freed."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm
from tests.freed.alive import remaining_after

tpu = tf.tpu.experimental.embedding
IDS, Y = np.array([[1], [2]]), np.ones([2, 1], np.float32)


def fit(package, layer):
    ids = package.Input([1], dtype="int64")
    rows = package.layers.Flatten()(layer()(ids))
    model = package.Model(ids, package.layers.Dense(1)(rows))
    model.compile("adam", "mse")
    model.fit(IDS, Y, verbose=0)


def config(optimizer=None):
    return tpu.FeatureConfig(
        tpu.TableConfig(100, 4, tf.ones_initializer(), optimizer, name="words")
    )


LAYERS = {
    "keras3 ShardedEmbedding": (
        keras,
        lambda: tlm.layers.ShardedEmbedding(100, 4, num_shards=2),
    ),
    "keras3 with an optimizer": (
        keras,
        lambda: tlm.layers.ShardedEmbedding(
            100, 4, num_shards=2, optimizer="adagrad"
        ),
    ),
    "keras3 open": (
        keras,
        lambda: tlm.layers.ShardedEmbedding(
            tlm.vocabulary.OpenVocabulary(100, on_evict=lambda **_: None),
            4,
            optimizer="adagrad",
        ),
    ),
    "keras3 TPUEmbedding": (
        keras,
        lambda: tlm.layers.TPUEmbedding(config(), tpu.Adagrad(0.1)),
    ),
    "tf_keras with an optimizer": (
        tf_keras,
        lambda: tlm.layers.tf_keras.ShardedEmbedding(
            100, 4, num_shards=2, optimizer="adagrad"
        ),
    ),
    "tf_keras TPUEmbedding": (
        tf_keras,
        lambda: tlm.layers.tf_keras.TPUEmbedding(config(), tpu.Adagrad(0.1)),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_model_trained_by_fit_is_freed(name):
    package, layer = LAYERS[name]
    assert not remaining_after(lambda: fit(package, layer))


def test_an_embedding_in_a_function_is_freed():
    def program():
        embedding = tlm.TPUEmbedding(config(tpu.Adam(0.1)), None)

        @tf.function
        def step():
            embedding.enqueue(tf.constant(IDS), training=True)
            rows = embedding.dequeue()
            embedding.apply_gradients(tf.ones_like(rows))

        step()

    assert not remaining_after(program)


def test_a_table_in_a_function_with_all_reduce_is_freed():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])

    def program():
        table = tlm.ShardedVariable(
            [tf.Variable(tf.ones([3, 2])) for _ in range(2)]
        )

        def replica():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 4]))
            gradient = tf.convert_to_tensor(tape.gradient(loss, table))
            return tf.distribute.get_replica_context().all_reduce(
                tf.distribute.ReduceOp.SUM, gradient
            )

        @tf.function
        def step():
            return strategy.run(replica)

        step()

    assert not remaining_after(program)
