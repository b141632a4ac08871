"""What `tf_keras` models have instead of the layer: a table as attribute."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layers import models

tf_keras = pytest.importorskip(
    "tf_keras", reason="needs tf_keras: pip install --no-deps tf_keras==2.21.*")


class Lookup(tf_keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.table = tlm.ShardedVariable.create(
            models.start_rows(), num_shards=3, name="words")

    def call(self, ids):
        return tf.gather(self.table, ids)


@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_a_layer_with_a_table_is_trained_by_fit(rule):
    layer = Lookup()
    model = tf_keras.Sequential([layer])
    model.compile(
        {"sgd": tf_keras.optimizers.SGD(models.LEARNING_RATE),
         "adagrad": tf_keras.optimizers.Adagrad(
             models.LEARNING_RATE, 0.25, epsilon=0.0)}[rule],
        lambda y, rows: tf.reduce_sum(rows * y, axis=[1, 2]))
    ids, y = models.batches(3)
    model.fit(ids, y, batch_size=models.NUM_SAMPLES, shuffle=False, verbose=0)
    twin = models.DenseTwin(rule)
    twin.fit(ids, y)
    assert len(model.trainable_weights) == 3
    np.testing.assert_allclose(
        layer.table.numpy(), twin.rows, rtol=2e-6, atol=1e-6)
