"""Compares the layer with `Embedding` if the model's optimizer trains both.

The layers in these tests have no optimizer.
"""

import keras
import numpy as np
import pytest

from tests.layers import models

o = keras.optimizers
OPTIMIZERS = {
    "sgd": lambda: o.SGD(0.1),
    "momentum": lambda: o.SGD(0.1, momentum=0.9),
    "nesterov": lambda: o.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: o.Adam(0.1),
    "amsgrad": lambda: o.Adam(0.1, amsgrad=True),
    "adamw": lambda: o.AdamW(0.1, weight_decay=0.5),
    "schedule free adamw": lambda: o.ScheduleFreeAdamW(0.1),
    "adamax": lambda: o.Adamax(0.1),
    "nadam": lambda: o.Nadam(0.1),
    "adagrad": lambda: o.Adagrad(0.1),
    "adadelta": lambda: o.Adadelta(1.0),
    "rmsprop": lambda: o.RMSprop(0.1, centered=True, momentum=0.5),
    "ftrl": lambda: o.Ftrl(0.1, l1_regularization_strength=0.1),
    "lion": lambda: o.Lion(0.1),
    "muon": lambda: o.Muon(0.1),
    "loss scale": lambda: o.LossScaleOptimizer(o.Adam(0.1), initial_scale=8),
    "ema": lambda: o.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "clipvalue": lambda: o.Adam(0.1, clipvalue=0.25),
    "global_clipnorm": lambda: o.Adam(0.1, global_clipnorm=1.0),
    "accumulation": lambda: o.Adam(0.1, gradient_accumulation_steps=2),
}
WHOLE = {
    "clipnorm": lambda: o.SGD(0.1, clipnorm=1.0),
    "Adafactor": lambda: o.Adafactor(0.1),
    "Lamb": lambda: o.Lamb(0.1),
    "Muon": lambda: o.Muon(0.1, exclude_embeddings=False),
}


def distinct_batches(num_batches):
    """Returns batches of ids. No id is repeated in a batch."""
    rng = np.random.default_rng(3)
    ids = np.concatenate(
        [
            rng.permutation(models.NUM_ROWS)[:9].reshape(3, 3)
            for _ in range(num_batches)
        ]
    )
    y = rng.integers(-4, 5, (*ids.shape, models.DIM)).astype(np.float32)
    return ids, y


def fit(model, make, ids, y, batch_size):
    model.compile(make(), models.weighted_sum)
    model.fit(ids, y, batch_size=batch_size, shuffle=False, verbose=0)


def by_embedding(make, ids, y, batch_size):
    inputs = keras.Input([models.LENGTH], dtype="int64")
    stock = keras.layers.Embedding(models.NUM_ROWS, models.DIM)
    model = keras.Model(inputs, stock(inputs))
    stock.embeddings.assign(models.start_rows())
    fit(model, make, ids, y, batch_size)
    return stock.embeddings.numpy()


def by_dense_gradients(make, ids, y, batch_size):
    """Trains a table with dense gradients, by products with one-hot rows."""
    inputs = keras.Input([models.LENGTH, models.NUM_ROWS])
    dense = keras.layers.Dense(models.DIM, use_bias=False, name="embedding")
    model = keras.Model(inputs, dense(inputs))
    dense.kernel.assign(models.start_rows())
    fit(model, make, np.eye(models.NUM_ROWS, dtype="f")[ids], y, batch_size)
    return dense.kernel.numpy()


def every_second(first):
    """Yields all names, and marks every second name as exhaustive.

    `make test` runs each optimizer with one of the two tests below.
    """
    for number, name in enumerate(OPTIMIZERS):
        is_marked = number % 2 != first
        yield pytest.param(
            name, marks=[pytest.mark.exhaustive] if is_marked else []
        )


@pytest.mark.parametrize("name", list(every_second(0)))
def test_training_equals_keras_own_embedding(name):
    model, layer = models.make_model(None, num_shards=4)
    ids, y = distinct_batches(4)
    fit(model, OPTIMIZERS[name], ids, y, 3)
    assert np.any(layer.embeddings.numpy() != models.start_rows())
    np.testing.assert_allclose(
        layer.embeddings.numpy(),
        by_embedding(OPTIMIZERS[name], ids, y, 3),
        rtol=2e-6,
        atol=2e-6,
    )


@pytest.mark.parametrize("name", list(every_second(1)))
def test_gradients_of_equal_ids_are_summed(name):
    model, layer = models.make_model(None, num_shards=4)
    ids, y = models.batches(4)
    fit(model, OPTIMIZERS[name], ids, y, models.NUM_SAMPLES)
    np.testing.assert_allclose(
        layer.embeddings.numpy(),
        by_dense_gradients(OPTIMIZERS[name], ids, y, models.NUM_SAMPLES),
        rtol=2e-6,
        atol=2e-6,
    )


@pytest.mark.parametrize("name", WHOLE)
def test_options_that_need_the_full_weight_raise_for_several_shards(name):
    model, layer = models.make_model(None, num_shards=2)
    ids, y = distinct_batches(2)
    with pytest.raises(ValueError, match=f"num_shards=1.*{name}.*words"):
        fit(model, WHOLE[name], ids, y, 3)
    np.testing.assert_array_equal(layer.embeddings.numpy(), models.start_rows())
    model, layer = models.make_model(None, num_shards=1)
    fit(model, WHOLE[name], ids, y, 3)
    # The reference uses one-hot rows, because Keras' `clipnorm` does not sum
    # the slices of duplicate ids.
    np.testing.assert_allclose(
        layer.embeddings.numpy(),
        by_dense_gradients(WHOLE[name], ids, y, 3),
        rtol=2e-6,
        atol=2e-6,
    )
