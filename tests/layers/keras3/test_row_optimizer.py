"""Tests `ShardedEmbedding(optimizer=...)` and its step count."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layers import models

CONFIG = tf.tpu.experimental.embedding


def train(layer, ids, row_gradients):
    layer.build()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(np.array(ids)) * row_gradients)
    weights = layer.trainable_variables
    keras.optimizers.SGD().apply_gradients(
        zip(tape.gradient(loss, weights), weights)
    )


def moved(layer):
    return (models.start_rows() - layer.embeddings.numpy())[7]


@pytest.mark.parametrize(
    ("given", "rate", "accumulator"),
    [
        ("sgd", 0.01, None),
        ("adagrad", 0.001, 0.1),
        (CONFIG.SGD(0.25), 0.25, None),
        (CONFIG.SGD(1), 1.0, None),
        (CONFIG.Adagrad(0.5, initial_accumulator_value=2.0), 0.5, 2.0),
    ],
)
def test_settings_equal_those_of_the_tpu_embedding(given, rate, accumulator):
    layer = models.make_layer(given)
    layer.build()
    assert float(layer.optimizer.learning_rate) == pytest.approx(rate)
    slots = {name: slot.numpy() for name, slot in layer.optimizer.slots.items()}
    assert list(slots) == (["accumulators"] if accumulator else [])
    for slot in slots.values():
        assert np.all(slot == np.float32(accumulator))


def test_the_learning_rate_can_be_set_during_training():
    layer = models.make_layer(CONFIG.SGD(0.5))
    train(layer, [7], [[2.0, 4.0]])
    assert moved(layer).tolist() == [1.0, 2.0]
    layer.optimizer.learning_rate = 0.25
    train(layer, [7], [[2.0, 4.0]])
    assert moved(layer).tolist() == [1.5, 3.0]


def test_a_schedule_is_called_with_the_step_number():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay(
        [0, 1], [1.0, 0.5, 0.25]
    )
    layer = models.make_layer(CONFIG.SGD(schedule))
    for total in (1.0, 1.5, 1.75, 2.0):
        train(layer, [7], [[1.0, 1.0]])
        assert moved(layer).tolist() == [total, total]


def test_a_callable_learning_rate_is_called_at_each_step():
    rate = tf.Variable(1.0)
    layer = models.make_layer(CONFIG.SGD(lambda: rate))
    train(layer, [7], [[1.0, 1.0]])
    rate.assign(0.5)
    train(layer, [7], [[1.0, 1.0]])
    assert moved(layer).tolist() == [1.5, 1.5]


@pytest.mark.parametrize("rate", [np.nan, np.inf, -1.0])
@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_an_invalid_learning_rate_raises_at_creation_and_in_training(
    rule, rate
):
    kind = {"sgd": CONFIG.SGD, "adagrad": CONFIG.Adagrad}[rule]
    with pytest.raises(ValueError, match="learning rate.*layer|words"):
        models.make_layer(kind(rate))
    layer = models.make_layer(kind(lambda: rate))
    layer.build()
    before = layer.embeddings.numpy()
    with pytest.raises(tf.errors.InvalidArgumentError, match="words"):
        train(layer, [7], [[1.0, 1.0]])
    np.testing.assert_array_equal(layer.embeddings.numpy(), before)
    assert int(layer.optimizer.iterations) == 0


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("adam", ValueError, "must be None.*embedding.Adam"),
        (keras.optimizers.Adagrad(), TypeError, "optimizer=None"),
        (tlm.optimizers.LAMB(0.1), ValueError, "LAMB.*TPUEmbedding"),
        (0.1, TypeError, "must be None"),
        (CONFIG.SGD, TypeError, "must be None"),
        (CONFIG.SGD(lambda step: step), ValueError, "without arguments"),
        (
            CONFIG.Adagrad(0.1, slot_variable_creation_fn=lambda *_: None),
            ValueError,
            "slot_variable_creation_fn",
        ),
    ],
)
def test_unsupported_optimizers_raise_with_the_layer_name(given, error, words):
    with pytest.raises(error, match=words) as caught:
        models.make_layer(given)
    assert "'words'" in str(caught.value)


def test_the_settings_object_is_not_changed():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    given = CONFIG.SGD(schedule)
    models.make_layer(given)
    assert given.learning_rate is schedule


def test_sharing_an_optimizer_between_layers_raises():
    layer = models.make_layer("adagrad")
    layer.build()
    with pytest.raises(ValueError, match="optimizer of another layer"):
        models.make_layer(layer.optimizer)


def test_compile_rejects_a_row_optimizer():
    model, layer = models.make_model("sgd")
    model.compile(layer.optimizer, models.weighted_sum)
    with pytest.raises(RuntimeError, match="of its layer only"):
        model.train_on_batch(*models.batches(1))


@pytest.mark.parametrize(
    "given",
    [
        CONFIG.SGD(0.25),
        CONFIG.Adagrad(0.5, initial_accumulator_value=2.0),
        CONFIG.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    ],
)
def test_its_config_creates_an_equal_optimizer(given):
    optimizer = models.make_layer(given).optimizer
    again = tlm.layers.RowOptimizer.from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()


def test_steps_without_a_gradient_of_the_table_are_not_counted():
    layer = models.make_layer("sgd")
    train(layer, [7], [[1.0, 1.0]])
    (weight,) = layer.trainable_variables
    other = keras.Variable(1.0)
    with pytest.raises(ValueError, match="got no gradient"):
        keras.optimizers.SGD().apply_gradients([(None, weight), (1.0, other)])
    keras.optimizers.SGD().apply_gradients([(1.0, other)])
    assert int(layer.optimizer.iterations) == 1
