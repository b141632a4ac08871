"""Tests a tf_keras `ShardedEmbedding` that several replicas train.

The tests correspond to tests/layers/test_embedding_replicas.py.
"""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm
from tests import strategies
from tests.layers import models
from tests.layers import test_embedding_replicas as keras3
from tests.layers.tf_keras import models as tfk

tpu = tf.tpu.experimental.embedding


def trained(num_replicas, optimizer="adagrad", model_optimizer=None, **options):
    """Returns a model after two epochs, and its layer."""
    if optimizer == "adagrad":
        optimizer = keras3.adagrad()
    with strategies.mirrored(num_replicas).scope():
        ids = tf_keras.Input([models.LENGTH], dtype="int64", name="ids")
        layer = tlm.layers.tf_keras.ShardedEmbedding(
            models.NUM_ROWS,
            models.DIM,
            optimizer=optimizer,
            embeddings_initializer=models.initializer,
            name="words",
            **options,
        )
        model = tf_keras.Model(ids, layer(ids), name="model")
        model.compile(
            (model_optimizer or (lambda: tf_keras.optimizers.SGD(0.5)))(),
            tfk.weighted_sum,
        )
    ids, y = keras3.data()
    model.fit(
        ids, y, batch_size=keras3.BATCH, shuffle=False, verbose=0, epochs=2
    )
    return model, layer


@pytest.mark.parametrize(
    "options",
    [
        {"num_shards": 3},
        {"embeddings_constraint": tf_keras.constraints.MaxNorm(1.0, axis=1)},
        {
            "optimizer": "model",
            "model_optimizer": lambda: tf_keras.optimizers.Adam(
                0.1, clipnorm=0.25
            ),
        },
        {"model_optimizer": lambda: tf_keras.optimizers.legacy.SGD(0.5)},
    ],
    ids=["shards", "constraint", "model", "legacy optimizer"],
)
def test_tables_are_bitwise_equal_to_those_of_one_replica(options):
    (_, two), (_, one) = trained(2, **options), trained(1, **options)
    models.assert_same_tables(two, one)


def test_each_row_counts_once_in_the_loss_of_a_regularizer():
    regularizer = tf_keras.regularizers.L2(0.125)
    (_, two), (_, one) = (
        trained(count, embeddings_regularizer=regularizer) for count in (2, 1)
    )
    # tf_keras adds the gradients of the loss in another order.
    np.testing.assert_allclose(
        two.embeddings.numpy(), one.embeddings.numpy(), rtol=1e-5
    )


@pytest.mark.parametrize("optimizer", ["adagrad", None])
def test_summary_and_checkpoints_are_those_of_one_replica(optimizer, tmp_path):
    two, layer = trained(2, optimizer)
    one, other = trained(1, optimizer)
    lines = []
    for model in (two, one):
        model.summary(print_fn=lambda *texts, **_: lines.append(texts))
    assert lines[: len(lines) // 2] == lines[len(lines) // 2 :]
    path = tf.train.Checkpoint(model=two).write(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(model=one).read(path).expect_partial()
    np.testing.assert_array_equal(
        other.embeddings.numpy(), layer.embeddings.numpy()
    )
    if optimizer is not None:
        models.assert_same_tables(other, layer)


def test_a_gradient_that_was_summed_over_replicas_is_applied_once():
    strategy = strategies.mirrored(2)
    with strategy.scope():
        layer = tfk.make_layer(tpu.SGD(1.0))
        layer.build()
        optimizer = tf_keras.optimizers.SGD()
    before = layer.embeddings.numpy()

    @tf.function
    def step():
        def in_replica():
            gradient = tf.IndexedSlices(
                tf.ones([1, models.DIM]), tf.constant([4]), tf.shape(before)
            )
            optimizer.apply_gradients(
                [(gradient, layer.trainable_weights[0])],
                skip_gradients_aggregation=True,
            )

        strategy.run(in_replica)

    step()
    before[4] -= 1
    np.testing.assert_array_equal(layer.embeddings.numpy(), before)
