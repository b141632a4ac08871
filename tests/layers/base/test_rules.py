"""Tests that `ShardedEmbedding` and `TPUEmbedding` apply equal updates."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm
from tests.layers import models

CONFIG = tf.tpu.experimental.embedding
NUM_STEPS = 3


def by_tpu_embedding(optimizer, ids, row_gradients):
    table = CONFIG.TableConfig(
        models.NUM_ROWS,
        models.DIM,
        optimizer=optimizer,
        name="words",
        initializer=lambda shape, dtype=None: models.start_rows(),
    )
    feature = CONFIG.FeatureConfig(table, max_sequence_length=models.LENGTH)
    embedding = tlm.TPUEmbedding(feature, None)
    for _ in range(NUM_STEPS):
        embedding.enqueue(tf.RaggedTensor.from_tensor(tf.constant(ids)))
        embedding.dequeue()
        embedding.apply_gradients(tf.constant(row_gradients))
    return tf.convert_to_tensor(embedding.embedding_tables[table]).numpy()


def by_layer(optimizer, ids, row_gradients):
    layer = models.make_layer(optimizer)
    layer.build()
    for _ in range(NUM_STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids) * row_gradients)
        weights = layer.trainable_variables
        keras.optimizers.SGD().apply_gradients(
            zip(tape.gradient(loss, weights), weights)
        )
    return layer.embeddings.numpy()


@pytest.mark.parametrize(
    "optimizer",
    [
        CONFIG.SGD(0.3),
        CONFIG.Adagrad(0.3),
        CONFIG.AdagradMomentum(0.3, 0.9),
        CONFIG.Adam(0.3),
        CONFIG.FTRL(0.3),
        CONFIG.SGD(0.3, clipvalue=1.0, weight_decay_factor=0.125),
    ],
    ids=["sgd", "adagrad", "adagrad_momentum", "adam", "ftrl", "modified"],
)
def test_the_layer_and_tpu_embedding_are_bitwise_equal(optimizer):
    ids, y = models.batches(1)
    np.testing.assert_array_equal(
        by_layer(optimizer, ids, y), by_tpu_embedding(optimizer, ids, y)
    )


@pytest.mark.parametrize("optimizer", [None, "model"])
@pytest.mark.parametrize("name", ["keras", "tf_keras"])
def test_a_strategy_with_one_replica_trains_like_no_strategy(name, optimizer):
    library = {"keras": keras, "tf_keras": tf_keras}[name]
    layers = {"keras": tlm.layers, "tf_keras": tlm.layers.tf_keras}[name]

    def trained(scope):
        library.utils.set_random_seed(1)
        with scope:
            model = library.Sequential(
                [
                    library.Input([2], dtype="int64"),
                    layers.ShardedEmbedding(
                        6, 2, num_shards=2, optimizer=optimizer
                    ),
                ]
            )
            model.compile("adagrad", "mse")
            model.train_on_batch(np.array([[1, 5]]), np.ones([1, 2, 2]))
            model.train_on_batch(np.array([[5, 5]]), np.ones([1, 2, 2]))
        return model.layers[-1].embeddings.numpy()

    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    np.testing.assert_array_equal(
        trained(strategy.scope()), trained(contextlib.nullcontext())
    )
