"""Replaced layers of Keras 3: subclasses, quantization, settings."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layers.test_embedding_replacement import (
    IDS,
    RULES,
    assert_equal,
    fit,
    functional,
    made,
    optimizer_of,
    replaced,
    values,
)

# These packages do not support all versions of Keras.
keras_hub = pytest.importorskip("keras_hub", exc_type=ImportError)
keras_rs = pytest.importorskip("keras_rs", exc_type=ImportError)
NUM_ROWS, DIM = 50, 4
NEXT = np.roll(IDS, 1, axis=1)


def tied(kind, **kwargs):
    keras.utils.set_random_seed(3)
    ids = keras.Input([IDS.shape[1]], dtype="int64")
    layer = kind(NUM_ROWS, DIM, name="words", **kwargs)
    hidden = keras.layers.Dense(DIM, name="hidden")(layer(ids))
    return keras.Model(ids, layer(hidden, reverse=True))


def fit_tied(model, rule):
    def loss(y, logits):
        one = keras.losses.sparse_categorical_crossentropy(
            y, logits, from_logits=True
        )
        return 3 * one

    model.compile(optimizer_of(keras, rule), loss)
    model.fit(IDS, NEXT, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return values(model)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "kind,kwargs",
    [
        (keras.layers.ReversibleEmbedding, {}),
        (keras.layers.ReversibleEmbedding, {"tie_weights": False}),
        (keras_hub.layers.ReversibleEmbedding, {"logit_soft_cap": 5.0}),
    ],
)
def test_a_reversible_layer_trains_like_the_stock_layer(
    kind, kwargs, rule, tmp_path
):
    model = tied(kind, **kwargs)
    before = values(model)
    stock = fit_tied(model, rule)
    assert np.abs(before[0] - stock[0]).max() > 1e-3
    model = replaced(tied(kind, **kwargs), keras, rule)
    assert_equal(stock, fit_tied(model, rule))
    assert isinstance(model.get_layer("words"), kind)

    path = str(tmp_path / "model.weights.h5")
    model.save_weights(path)
    back = tied(kind, **kwargs)
    back.load_weights(path)
    assert_equal(values(model), values(back), atol=0)
    back.save_weights(path)
    again = replaced(tied(kind, **kwargs), keras, rule)
    again.load_weights(path)
    assert_equal(values(model), values(again), atol=0)
    # The stock class is part of a saved model.
    config = again.get_layer("words").get_config()
    layer = type(again.get_layer("words")).from_config(config)
    assert isinstance(layer, kind)
    assert layer.tie_weights == again.get_layer("words").tie_weights


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_embed_reduce_trains_like_the_stock_layer(rule, combiner):
    def make():
        keras.utils.set_random_seed(3)
        ids = keras.Input([IDS.shape[1]], dtype="int64")
        layer = keras_rs.layers.EmbedReduce(NUM_ROWS, DIM, combiner=combiner)
        return keras.Model(ids, keras.layers.Dense(1)(layer(ids)))

    stock = fit(make(), keras, rule)
    assert_equal(stock, fit(replaced(make(), keras, rule), keras, rule))


def test_sparse_ids_are_looked_up_like_in_the_stock_layer():
    layer = keras.layers.Embedding(NUM_ROWS, DIM)
    ids = tf.sparse.from_dense([[1, 0, 3], [0, 0, 2]])
    expected = layer(ids)
    replaced(layer, keras)
    np.testing.assert_array_equal(expected, layer(ids))


def test_a_quantized_layer_is_kept():
    model = made(functional, keras)
    model.quantize("int8")
    report = tlm.layers.shard_embeddings(model, min_rows=10)
    assert "quantized (int8)" in report.not_replaced[0].reason


def test_a_layer_with_lora_is_kept():
    model = made(functional, keras, lora_rank=2)
    report = tlm.layers.shard_embeddings(model, min_rows=10)
    assert "LoRA" in report.not_replaced[0].reason


def test_lora_raises_an_error_after_replacement():
    layer = replaced(made(functional, keras), keras).get_layer("words")
    with pytest.raises(NotImplementedError, match="LoRA must be enabled"):
        layer.enable_lora(2)


def test_a_model_compiled_for_xla_is_trained_without():
    model = made(functional, keras)
    model.compile(optimizer_of(keras, "SGD"), "mse", jit_compile=True)
    replaced(model, keras)
    assert not model.jit_compile
    model.fit(IDS, IDS[:, :1], verbose=0)


def test_clipping_by_the_models_optimizer_emits_a_warning():
    model = replaced(made(functional, keras), keras)
    model.compile(keras.optimizers.SGD(0.1, clipnorm=1.0), "mse")
    with pytest.warns(UserWarning, match="clipnorm of the model's optimizer"):
        model.fit(IDS, IDS[:, :1], verbose=0)


def test_gradient_accumulation_equals_the_stock_model():
    def run(is_replaced):
        model = made(functional, keras)
        if is_replaced:
            replaced(model, keras, "Adagrad")
        model.compile(
            keras.optimizers.Adagrad(0.5, gradient_accumulation_steps=2), "mse"
        )
        y = IDS[:, :1].astype(np.float32)
        model.fit(IDS, y, batch_size=8, shuffle=False, verbose=0)
        return values(model)

    assert_equal(run(False), run(True))


def test_a_class_without_registration_raises_an_error_when_loaded():
    layer = replaced(keras.layers.Embedding(NUM_ROWS, DIM), keras)
    config = layer.get_config()
    config["replaced_class"] = {
        "module": "os",
        "name": "system",
        "registered_name": "os>system",
    }
    with pytest.raises(ValueError, match="subclass of keras.layers.Embedding"):
        type(layer).from_config(config)
