"""Tests `tlm.layers.tf_keras.DotInteraction`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.test_ops import OPTIONS, has_op

tf_keras = pytest.importorskip(
    "tf_keras", reason="needs tf_keras: pip install --no-deps tf_keras"
)

NUM_FEATURES, DIM, NUM_SAMPLES = 4, 4, 16


def data() -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    features = rng.uniform(-1, 1, [NUM_FEATURES, NUM_SAMPLES, DIM])
    return [*features.astype(np.float32)], rng.uniform(size=[NUM_SAMPLES, 1])


def model_with(interaction, **compile_options):
    tf_keras.utils.set_random_seed(1)
    inputs = [tf_keras.Input([DIM]) for _ in range(NUM_FEATURES)]
    rows = [tf_keras.layers.Dense(DIM)(one) for one in inputs]
    model = tf_keras.Model(inputs, tf_keras.layers.Dense(1)(interaction(rows)))
    model.compile("adagrad", "mse", **compile_options)
    return model


def trained_weights(model) -> list[np.ndarray]:
    model.fit(*data(), batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def assert_close(found, expected):
    for one, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training_equals_stock_operations(options):
    layer = tlm.layers.tf_keras.DotInteraction(**options)
    model = model_with(layer)
    stock = model_with(lambda rows: layer(rows, training=False))
    assert layer.compute_output_shape([(None, DIM)] * NUM_FEATURES) == (
        layer.output_shape
        if not isinstance(layer.output_shape, list)
        else layer.output_shape[0]
    )
    assert_close(trained_weights(model), trained_weights(stock))


def test_only_training_uses_the_op():
    layer = tlm.layers.tf_keras.DotInteraction()
    tensors = list(map(tf.constant, data()[0]))
    for training in (True, False, None):
        function = tf.function(lambda x, t=training: layer(x, training=t))
        assert has_op(function, tensors) == (training is True)
    model = model_with(layer)
    function = tf.function(lambda x: model(x, training=True))
    assert has_op(function, tensors)


@pytest.mark.exhaustive
def test_a_model_with_jit_compile_trains():
    expected = trained_weights(model_with(tlm.layers.tf_keras.DotInteraction()))
    model = model_with(tlm.layers.tf_keras.DotInteraction(), jit_compile=True)
    assert_close(trained_weights(model), expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["keras", "tf"])
def test_a_saved_model_is_loaded(form, tmp_path):
    model = model_with(
        tlm.layers.tf_keras.DotInteraction(self_interaction=True)
    )
    trained_weights(model)
    path = str(tmp_path / ("model.keras" if form == "keras" else "model"))
    model.save(path)
    loaded = tf_keras.models.load_model(path)
    assert any(
        isinstance(layer, tlm.layers.tf_keras.DotInteraction)
        and layer.self_interaction
        for layer in loaded.layers
    )
    np.testing.assert_allclose(
        loaded.predict(data()[0], verbose=0),
        model.predict(data()[0], verbose=0),
        rtol=1e-6,
    )


def test_layers_of_the_other_keras_version_raise():
    with pytest.raises(RuntimeError, match=r"layers\.tf_keras\.DotInteraction"):
        tlm.layers.DotInteraction()([tf_keras.Input([3])] * 2)
    with pytest.raises(RuntimeError, match=r"tlm\.layers\.DotInteraction"):
        tlm.layers.tf_keras.DotInteraction()([keras.Input([3])] * 2)


def test_invalid_inputs_raise():
    layer = tlm.layers.tf_keras.DotInteraction(name="pairs")
    with pytest.raises(ValueError, match="same shape.*'pairs'"):
        layer([tf_keras.Input([3]), tf_keras.Input([4])])
    with pytest.raises(TypeError, match="list or tuple.*'pairs'"):
        layer(tf.zeros([2, 3]))
