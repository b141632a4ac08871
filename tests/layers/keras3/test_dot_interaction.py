"""Tests `tlm.layers.DotInteraction` in Keras 3 models."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout.meshes import mesh_of
from tests.test_ops import OPTIONS, has_op

keras_rs = pytest.importorskip("keras_rs", exc_type=ImportError)

NUM_FEATURES, DIM, NUM_SAMPLES = 4, 4, 16


def data() -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    features = rng.uniform(-1, 1, [NUM_FEATURES, NUM_SAMPLES, DIM])
    return [*features.astype(np.float32)], rng.uniform(size=[NUM_SAMPLES, 1])


def model_with(interaction, **compile_options) -> keras.Model:
    """Returns a model that projects features and multiplies the results."""
    keras.utils.set_random_seed(1)
    inputs = [keras.Input([DIM]) for _ in range(NUM_FEATURES)]
    rows = [
        keras.layers.Dense(DIM, name=f"row_{i}")(x)
        for i, x in enumerate(inputs)
    ]
    products = interaction(rows)
    model = keras.Model(inputs, keras.layers.Dense(1, name="top")(products))
    model.compile(
        keras.optimizers.Adagrad(0.1),
        "mse",
        **{"jit_compile": "auto", **compile_options},
    )
    return model


def trained_weights(model: keras.Model) -> list[np.ndarray]:
    model.fit(*data(), batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def assert_close(found, expected):
    for one, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training_equals_the_layer_of_keras_rs(options):
    layer = tlm.layers.DotInteraction(**options)
    model = model_with(layer)
    stock = model_with(
        keras_rs.layers.DotInteraction(**options), jit_compile=False
    )
    assert not model.jit_compile
    assert [w.path for w in model.weights] == [w.path for w in stock.weights]
    assert model.output_shape == stock.output_shape
    assert layer.output.shape == (
        keras_rs.layers.DotInteraction(**options).compute_output_shape(
            [(None, DIM)] * NUM_FEATURES
        )
    )
    assert_close(trained_weights(model), trained_weights(stock))
    np.testing.assert_allclose(
        model.predict(data()[0], verbose=0),
        stock.predict(data()[0], verbose=0),
        rtol=1e-5,
        atol=1e-6,
    )


def test_only_training_uses_the_op():
    layer = tlm.layers.DotInteraction()
    tensors = list(map(tf.constant, data()[0]))
    for training in (True, False, None):
        function = tf.function(lambda x, t=training: layer(x, training=t))
        assert has_op(function, tensors) == (training is True)
        np.testing.assert_allclose(
            function(tensors), layer(tensors), rtol=1e-5, atol=1e-6
        )


@pytest.mark.exhaustive
def test_a_model_with_an_explicit_jit_compile_trains_without_xla():
    expected = trained_weights(model_with(tlm.layers.DotInteraction()))
    with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
        model = model_with(tlm.layers.DotInteraction(), jit_compile=True)
    assert not model.jit_compile
    assert_close(trained_weights(model), expected)


def test_a_function_that_xla_compiles_can_call_the_layer():
    layer = tlm.layers.DotInteraction()
    tensors = list(map(tf.constant, data()[0]))
    function = tf.function(lambda x: layer(x, training=True), jit_compile=True)
    assert not has_op(function, tensors)
    np.testing.assert_allclose(
        function(tensors), layer(tensors), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_computes_in_the_compute_dtype(policy):
    layer = tlm.layers.DotInteraction(dtype=policy)
    found = layer(data()[0], training=True)
    assert found.dtype == layer.compute_dtype
    expected = tlm.ops.dot_interaction(data()[0])
    np.testing.assert_allclose(tf.cast(found, tf.float32), expected, atol=0.05)
    symbolic = layer([keras.Input([DIM])] * 2)
    assert symbolic.dtype == layer.compute_dtype


def test_float64_is_supported():
    layer = tlm.layers.DotInteraction(dtype="float64")
    features = [one.astype(np.float64) for one in data()[0]]
    found = layer(features, training=True)
    assert found.dtype == tf.float64
    np.testing.assert_allclose(found[:, 0], (features[0] * features[1]).sum(1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_saved_model_is_loaded(options, tmp_path):
    model = model_with(tlm.layers.DotInteraction(**options, name="pairs"))
    trained_weights(model)
    path = str(tmp_path / "model.keras")
    model.save(path)
    loaded = keras.models.load_model(path)
    layer = loaded.get_layer("pairs")
    assert isinstance(layer, tlm.layers.DotInteraction)
    assert {name: getattr(layer, name) for name in options} == options
    np.testing.assert_array_equal(
        loaded.predict(data()[0], verbose=0),
        model.predict(data()[0], verbose=0),
    )
    assert_close(trained_weights(loaded), trained_weights(model))


@pytest.mark.exhaustive
def test_an_exported_model_contains_stock_operations(tmp_path):
    model = model_with(tlm.layers.DotInteraction())
    trained_weights(model)
    model.export(str(tmp_path), verbose=False)
    assert b"LayoutMap" not in (tmp_path / "saved_model.pb").read_bytes()
    expected = model.predict(data()[0], verbose=0)
    function = tf.saved_model.load(str(tmp_path)).signatures["serving_default"]
    names = [x.name for x in model.inputs]
    found = function(**dict(zip(names, map(tf.constant, data()[0]))))
    (output,) = found.values()
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [{"batch": 4}, {"batch": 2, "model": 2}])
def test_training_on_a_mesh_equals_one_device(sizes):
    expected = trained_weights(model_with(tlm.layers.DotInteraction()))
    layout_map = tlm.LayoutMap(mesh_of(**sizes))
    if "model" in sizes:
        layout_map["row_.*kernel"] = (None, "model")
        layout_map["row_.*bias"] = ("model",)
    with tlm.layout_map_scope(layout_map, batch_dim="batch"):
        model = model_with(tlm.layers.DotInteraction())
    assert_close(trained_weights(model), expected)
    assert model.predict(data()[0], verbose=0).shape == (NUM_SAMPLES, 1)


def test_a_custom_loop_has_the_gradients_of_the_op():
    layer = tlm.layers.DotInteraction()
    tensors = list(map(tf.constant, data()[0]))

    @tf.function
    def gradients():
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            loss = tf.reduce_sum(layer(tensors, training=True) ** 2)
        return tape.gradient(loss, tensors)

    with tf.GradientTape() as tape:
        tape.watch(tensors)
        loss = tf.reduce_sum(layer(tensors, training=False) ** 2)
    assert_close(gradients(), tape.gradient(loss, tensors))


@pytest.mark.parametrize(
    ("inputs", "error", "words"),
    [
        ([], ValueError, "`inputs` must contain.*'pairs'"),
        (np.zeros([2, 3]), TypeError, "list or tuple.*ndarray.*'pairs'"),
        ([np.zeros([2, 3, 4])], ValueError, "rank 2.*'pairs'"),
        ([np.zeros([2, 3]), np.zeros([2, 4])], ValueError, "same shape"),
        (
            [keras.KerasTensor([None, 3]), keras.KerasTensor([None, 4])],
            ValueError,
            "same shape.*'pairs'",
        ),
        (
            [keras.KerasTensor([2, 3]), keras.KerasTensor([4, 3])],
            ValueError,
            "same shape.*'pairs'",
        ),
    ],
)
def test_invalid_inputs_raise(inputs, error, words):
    layer = tlm.layers.DotInteraction(name="pairs")
    with pytest.raises(error, match=words):
        layer(inputs)


def test_the_output_shape_of_different_features_raises():
    layer = tlm.layers.DotInteraction()
    assert layer.compute_output_shape([(None, 3), (5, 3)])[1] == 1
    with pytest.raises(ValueError, match="same shape"):
        layer.compute_output_shape([(None, 3), (None, 4)])
