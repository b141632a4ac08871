"""Checks that tensors without elements do not break the process."""

import faulthandler

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.layout import pairs
from tests.layout.meshes import axes_of, layout_of, mesh_of
from tf_layoutmap.layout import default_mesh, to_host, to_mesh

dtensor = tf.experimental.dtensor

faulthandler.enable()
MESH = mesh_of(batch=2, model=2)
EMPTY = np.ones((0, 4), np.float32)
SHARDED = layout_of(MESH, "batch", "model")
REPLICATED = layout_of(MESH, None, None)
AXES = {"d2.kernel": ("model", None)}


def attention():
    x = keras.Input((6, 8))
    y = keras.layers.MultiHeadAttention(2, 4, name="att")(x, x)
    return keras.Model(x, keras.layers.Dense(4, name="d2")(y))


def recurrent():
    return pairs.sequential((6, 8), keras.layers.GRU(8, name="d1"))


def gradients(model, x, traced):
    """Returns the gradients of a model on the host.

    Args:
      model: Model on a mesh, or on one device.
      x: Batch.
      traced: What a `tf.function` computes: "nothing", "forward" or "step".
    """

    def call(x):
        return model(x)

    forward = (
        tf.function(call, autograph=False) if traced == "forward" else call
    )

    def step(x):
        with tf.GradientTape() as tape:
            y = forward(x)
            loss = tf.reduce_sum(y * y)
        return tape.gradient(loss, [w.value for w in model.trainable_weights])

    if traced == "step":
        step = tf.function(step, autograph=False)
    return [np.asarray(one) for one in step(x)]


def check_collectives():
    """Checks that the collective operations of the process still work."""
    x = to_mesh(np.ones((2, 4), np.float32), SHARDED)
    assert to_host(tf.reduce_sum(x)) == 8
    assert to_host(dtensor.relayout(x, REPLICATED)).sum() == 8


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("traced", ["nothing", "forward", "step"])
@pytest.mark.parametrize(
    "make, axes",
    [
        (attention, {"att.*query.*kernel": (None, "model", None)}),
        (recurrent, {"d1.*kernel": (None, "model")}),
    ],
)
def test_gradients_of_an_empty_batch_are_zero(make, axes, traced):
    model = pairs.on_mesh(make, AXES | axes)
    expected = [np.zeros(w.shape) for w in model.trainable_weights]
    found = gradients(model, pairs.SERIES[:0], traced)
    pairs.assert_alike(expected, found, atol=0)
    check_collectives()


@pytest.mark.parametrize("layout", [SHARDED, REPLICATED])
@pytest.mark.parametrize(
    "operation",
    [
        lambda x: dtensor.relayout(x, REPLICATED),
        lambda x: dtensor.relayout(x, SHARDED),
        lambda x: tf.einsum(
            "bi,ij->bj", x, to_mesh(np.eye(4, dtype="f"), SHARDED)
        ),
        lambda x: tf.concat([x, x], 0),
        lambda x: tf.reduce_sum(x, 1),
        lambda x: x.numpy(),
    ],
    ids=["gather", "shard", "einsum", "concat", "sum", "numpy"],
)
def test_an_empty_tensor_stays_empty(operation, layout):
    result = operation(to_mesh(EMPTY, layout))
    assert result.shape[0] == 0
    check_collectives()


def test_sums_of_an_empty_tensor_are_zero():
    with default_mesh(MESH):
        x = to_mesh(EMPTY, SHARDED)
        np.testing.assert_array_equal(to_host(tf.reduce_sum(x, 0)), [0] * 4)
        product = tf.matmul(x, to_mesh(EMPTY, SHARDED), transpose_a=True)
        np.testing.assert_array_equal(to_host(product), np.zeros((4, 4)))
        # A relayout keeps the axes that the new layout matches.
        matched = dtensor.relayout(x, layout_of(MESH, dtensor.MATCH, None))
        assert dtensor.fetch_layout(matched).sharding_specs == [
            "batch",
            dtensor.UNSHARDED,
        ]


def dropout():
    return pairs.sequential(
        (8,),
        keras.layers.Dense(16, name="d1"),
        keras.layers.Dropout(0.5, seed=1),
    )


def test_steps_with_empty_batches():
    x, y = pairs.FEATURES, pairs.LABELS
    model, plain = (
        pairs.on_mesh(dropout, pairs.DENSE),
        pairs.plain(dropout),
    )
    for one in (model, plain):
        one.compile(keras.optimizers.SGD(0.01), pairs.loss())
    for count in (0, 8):
        pairs.assert_alike(
            plain.train_on_batch(x[:count], y[:count]),
            model.train_on_batch(x[:count], y[:count]),
        )
    assert model.test_on_batch(x[:0], y[:0]) == 0
    assert model.predict_on_batch(x[:0]).shape == (0, 4)
    pairs.assert_same_weights(plain, model)
    assert axes_of(model.layers[0].kernel) == (None, "model")
