"""Models of `tests.layers.models` for tf_keras, with the same values."""

import numpy as np
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm
from tests.layers import models


@tf_keras.saving.register_keras_serializable("tests")
def weighted_sum(y, rows):
    return tf.reduce_sum(tf.cast(rows, y.dtype) * y, axis=[1, 2])


@tf_keras.saving.register_keras_serializable("tests")
def initializer(shape, dtype=None, partition_shape=None, partition_offset=None):
    return models.initializer(shape, dtype, partition_shape, partition_offset)


def make_layer(optimizer, num_shards=3, **kwargs):
    return tlm.layers.tf_keras.ShardedEmbedding(
        models.NUM_ROWS,
        models.DIM,
        num_shards=num_shards,
        optimizer=optimizer,
        **{"name": "words", "embeddings_initializer": initializer, **kwargs},
    )


def make_model(optimizer, num_shards=3, **kwargs):
    """Returns a model with one embedding layer, and the layer."""
    ids = tf_keras.Input([models.LENGTH], dtype="int64")
    layer = make_layer(optimizer, num_shards, **kwargs)
    return tf_keras.Model(ids, layer(ids)), layer


def fit(model, ids, y):
    model.fit(ids, y, batch_size=models.NUM_SAMPLES, shuffle=False, verbose=0)


def unsharded(layer, make_optimizer, ids, y, run_eagerly=False):
    """Trains `tf_keras.layers.Embedding` on the same data; returns its rows."""
    inputs = tf_keras.Input([models.LENGTH], dtype="int64")
    stock = tf_keras.layers.Embedding(models.NUM_ROWS, models.DIM)
    model = tf_keras.Model(inputs, stock(inputs))
    stock.embeddings.assign(models.start_rows())
    model.compile(make_optimizer(), weighted_sum, run_eagerly=run_eagerly)
    fit(model, ids, y)
    assert np.any(stock.embeddings.numpy() != models.start_rows())
    assert layer.embeddings.shape == stock.embeddings.shape
    return stock.embeddings.numpy()
