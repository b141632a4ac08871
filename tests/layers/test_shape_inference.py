"""Checks tables without a mesh that a `tf.function` of a layer calls."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm

IDS = np.arange(16).reshape(8, 2)


def table(num_rows):
    return tlm.layers.ShardedEmbedding(
        num_rows, 4, optimizer="sgd", embeddings_initializer="zeros"
    )


class LooksUp(keras.layers.Layer):
    """Layer that calls a table in a function, and builds it in this call."""

    def __init__(self, layer, is_function):
        super().__init__()
        self.layer = layer
        self.read = tf.function(layer) if is_function else layer

    def call(self, ids):
        return self.read(ids)


def closed():
    return table(16)


def with_open_vocabulary():
    return table(tlm.vocabulary.OpenVocabulary(capacity=32))


def of_features():
    config = tf.tpu.experimental.embedding
    rows = config.TableConfig(16, 4, tf.zeros, combiner="sum", name="rows")
    return tlm.layers.TPUEmbedding(config.FeatureConfig(rows), config.SGD(0.5))


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("layer", [closed, with_open_vocabulary, of_features])
def test_table_in_a_function_of_a_layer_is_trained(layer, run_eagerly):
    found = []
    for is_function in (False, True):
        model = keras.Sequential(
            [
                keras.Input((2,), dtype="int64"),
                LooksUp(layer(), is_function),
                keras.layers.Flatten(),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=run_eagerly)
        y = np.ones([8, model.output_shape[1]])
        model.fit(IDS, y, batch_size=4, verbose=0)
        found.append([np.asarray(model(IDS)), model.predict(IDS, verbose=0)])
        assert np.all(found[-1][0])
    np.testing.assert_array_equal(found[0], found[1])
