"""Optimizers with `use_ema` skip tables that train themselves."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding
ROWS, DIM = 6, 3
IDS = np.arange(24).reshape(12, 2) % ROWS
LABELS = np.linspace(-1, 1, 12, dtype="f")[:, None]


def closed(optimizer):
    layer = tlm.layers.ShardedEmbedding(ROWS, DIM, optimizer=optimizer)
    return layer, lambda: layer.embeddings.numpy()


def replaced():
    layer = keras.layers.Embedding(ROWS, DIM)
    model = keras.Sequential([keras.Input([2], dtype="int64"), layer])
    tlm.layers.shard_embeddings(model, min_rows=1)
    return layer, lambda: layer.embeddings.numpy()


def with_keys():
    layer = tlm.layers.ShardedEmbedding(
        tlm.vocabulary.OpenVocabulary(16), DIM, optimizer=tpu.SGD(0.1)
    )
    return layer, lambda: layer.embeddings.numpy()


def features():
    table = tpu.TableConfig(ROWS, DIM, tf.ones, tpu.SGD(0.1), "sum", "t")
    layer = tlm.layers.TPUEmbedding(tpu.FeatureConfig(table, 2), None)
    return layer, lambda: layer.embedding.embedding_tables[table].numpy()


TABLES = {
    "model": lambda: closed("model"),
    "separate": lambda: closed(tpu.SGD(0.1)),
    "replaced": replaced,
    "keys": with_keys,
    "features": features,
}


def sgd(**options):
    return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, **options)


OPTIMIZERS = {
    "plain": sgd,
    "overwrite": lambda: sgd(ema_overwrite_frequency=2),
    "multi": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(sgd())
    ),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        sgd(), initial_scale=4.0
    ),
}
if not hasattr(keras.optimizers, "MultiOptimizer"):
    del OPTIMIZERS["multi"]
CALLBACKS = {
    "none": list,
    "swap": lambda: [keras.callbacks.SwapEMAWeights()],
    "swap on epoch": lambda: [
        keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    ],
}


@pytest.mark.filterwarnings("ignore:use_ema")
@pytest.mark.covering(1, 3)
@pytest.mark.parametrize("callbacks", CALLBACKS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("table", TABLES)
def test_averaging_skips_the_table(table, optimizer, callbacks):
    keras.utils.set_random_seed(1)
    layer, rows = TABLES[table]()
    inputs = keras.Input([2], dtype="int64")
    dense = keras.layers.Dense(1)
    model = keras.Model(inputs, dense(keras.layers.Flatten()(layer(inputs))))
    model.compile(OPTIMIZERS[optimizer](), "mse", run_eagerly=True)
    before = rows()
    seen = []

    def record(epoch, logs):
        seen.append(rows())

    model.fit(
        IDS,
        LABELS,
        batch_size=6,
        epochs=2,
        verbose=0,
        validation_data=(IDS, LABELS),
        callbacks=[
            *CALLBACKS[callbacks](),
            keras.callbacks.LambdaCallback(on_epoch_end=record),
        ],
    )
    assert np.any(seen[0] != before)
    np.testing.assert_array_equal(rows(), seen[-1])
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    (inner,) = getattr(inner, "optimizers", [inner])
    (average,) = [
        one
        for one in inner._model_variables_moving_average
        if one is not None and one.shape == dense.kernel.shape
    ]
    np.testing.assert_array_equal(dense.kernel, average)


@pytest.mark.filterwarnings("ignore:use_ema")
def test_other_weights_are_averaged_as_in_stock():
    kernels = []
    for kind in ("model", "stock"):
        keras.utils.set_random_seed(1)
        layer = (
            keras.layers.Embedding(ROWS, DIM)
            if kind == "stock"
            else closed("model")[0]
        )
        dense = keras.layers.Dense(1)
        model = keras.Sequential(
            [
                keras.Input([2], dtype="int64"),
                layer,
                keras.layers.Flatten(),
                dense,
            ]
        )
        model.compile(sgd(), "mse", run_eagerly=True)
        model.fit(IDS, LABELS, batch_size=6, shuffle=False, verbose=0)
        kernels.append(dense.kernel.numpy())
    np.testing.assert_allclose(*kernels, rtol=1e-6)


def test_a_table_that_follows_the_optimizer_warns():
    layer, _ = closed("model")
    layer.build(None)
    with pytest.warns(UserWarning, match="use_ema"):
        sgd().build(layer.trainable_variables)
