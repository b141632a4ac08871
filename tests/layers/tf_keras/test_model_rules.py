"""Compares a table that follows the model's optimizer with `Embedding`."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm
from tests.layers import model_rule_cases as cases

SETTINGS = {**cases.SETTINGS, "loss scale": {}}
# tf_keras has no option for the epsilon of AdamW in the other cases.
LEGACY = tf_keras.optimizers.legacy


def make_layer(kind="model"):
    if kind == "stock":
        layer = tf_keras.layers.Embedding(cases.NUM_ROWS, cases.DIM)
    else:
        layer = tlm.layers.tf_keras.ShardedEmbedding(
            cases.NUM_ROWS, cases.DIM, num_shards=2, optimizer=kind
        )
    layer.build((None,))
    layer.embeddings.assign(cases.start_rows())
    return layer


def make(name, setting):
    optimizer = cases.make(tf_keras, name, setting, jit_compile=False)
    if setting == "loss scale":
        return tf_keras.mixed_precision.LossScaleOptimizer(
            optimizer, dynamic=False, initial_scale=8.0
        )
    return optimizer


def trained(kind, name, setting):
    layer, other = make_layer(kind), tf.Variable(np.arange(4.0, dtype="f"))
    cases.train(
        [layer.trainable_weights[0], other],
        make(name, setting).apply_gradients,
        scale=8.0 if setting == "loss scale" else 1.0,
    )
    return layer.embeddings.numpy(), other.numpy()


@pytest.mark.covering(1)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", cases.OPTIMIZERS)
def test_looked_up_rows_equal_stock(name, setting):
    for ours, stock in zip(
        trained("model", name, setting),
        trained("stock", name, setting),
        strict=True,
    ):
        np.testing.assert_allclose(ours, stock, rtol=1e-6, atol=1e-6)


def small_model(kind="model"):
    tf_keras.utils.set_random_seed(0)
    inputs = tf_keras.Input([3], dtype="int64")
    layer = make_layer(kind)
    model = tf_keras.Model(
        inputs,
        tf_keras.layers.Dense(1)(tf_keras.layers.Flatten()(layer(inputs))),
    )
    return model, layer


def fit(model, **options):
    ids = np.arange(21).reshape(7, 3) % cases.NUM_ROWS
    labels = np.linspace(-1, 1, 7, dtype="f")[:, None]
    model.fit(ids, labels, batch_size=7, shuffle=False, verbose=0, **options)


def test_changes_of_the_learning_rate_reach_the_table():
    rows = []
    for kind in ("model", "stock"):
        model, layer = small_model(kind)
        model.compile(tf_keras.optimizers.Adam(0.001), "mse", run_eagerly=True)
        fit(
            model,
            epochs=3,
            callbacks=[
                tf_keras.callbacks.LearningRateScheduler(
                    lambda epoch: 0.1 / (1 + epoch)
                )
            ],
        )
        rows.append(layer.embeddings.numpy())
    np.testing.assert_allclose(rows[0], rows[1], rtol=1e-5, atol=1e-6)
    assert np.abs(rows[0] - cases.start_rows()).max() > 0.1


def test_the_layer_shows_rule_and_rate_of_the_model():
    model, layer = small_model()
    model.compile(tf_keras.optimizers.Adam(0.25), "mse")
    fit(model)
    assert layer.optimizer.describe() == (
        "Adam, learning rate 0.25 (the model's optimizer)"
    )
    assert float(layer.optimizer.learning_rate) == 0.25


@pytest.mark.parametrize(
    ("optimizer", "received"),
    [
        (lambda: tf_keras.optimizers.Nadam(), "Nadam"),
        (lambda: LEGACY.Adam(), "Adam"),
    ],
)
def test_another_optimizer_raises_before_a_weight_changes(optimizer, received):
    model, layer = small_model()
    kernel = model.layers[-1].kernel.numpy()
    model.compile(optimizer(), "mse")
    with pytest.raises(ValueError, match=f"(?s)SGD.*Lamb.*{received}"):
        fit(model)
    np.testing.assert_array_equal(layer.embeddings, cases.start_rows())
    np.testing.assert_array_equal(model.layers[-1].kernel, kernel)


def test_a_saved_model_continues_with_its_slot_variables(tmp_path):
    model, layer = small_model()
    model.compile(tf_keras.optimizers.Adam(0.1), "mse")
    fit(model, epochs=2)
    model.save(tmp_path / "model.keras")
    other = tf_keras.models.load_model(tmp_path / "model.keras")
    fit(model, epochs=2)
    fit(other, epochs=2)
    assert other.layers[1].get_config()["optimizer"] == "model"
    np.testing.assert_allclose(
        other.layers[1].embeddings, layer.embeddings, rtol=1e-6
    )
