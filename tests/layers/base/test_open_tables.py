"""Tests layers with open-vocabulary tables, in both Keras versions."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm
from tests import strategies

tpu = tf.tpu.experimental.embedding
VERSIONS = [
    (keras, tlm.layers.TPUEmbedding),
    (tf_keras, tlm.layers.tf_keras.TPUEmbedding),
]


def model_of(
    version, layer_class, dtype="string", table_dtypes=None, **settings
):
    words = tpu.TableConfig(
        100,
        4,
        initializer=tf.random_uniform_initializer(-1.0, 1.0),
        combiner="sum",
        name="words",
    )
    layer = layer_class(
        {"text": tpu.FeatureConfig(words)},
        tpu.Adagrad(0.5),
        table_dtypes=table_dtypes,
        vocabularies={"words": tlm.OpenVocabulary(100, **settings)},
    )
    inputs = {"text": version.Input([3], dtype=dtype, name="text")}
    outputs = version.layers.Dense(1, kernel_initializer="ones")(
        layer(inputs)["text"]
    )
    model = version.Model(inputs, outputs)
    model.compile(version.optimizers.SGD(0.01), "mse")
    return model, layer


def data(most=40, seed=0, dtype=str):
    words = np.random.default_rng(seed).integers(0, most, [64, 3])
    return (
        {"text": tf.constant(words.astype(dtype))},
        tf.constant(words.sum(1, keepdims=True) / most, tf.float32),
    )


@pytest.mark.parametrize(("version", "layer_class"), VERSIONS)
def test_fit_accepts_string_ids(tmp_path, version, layer_class):
    model, layer = model_of(version, layer_class)
    inputs, labels = data()
    before = model.evaluate(inputs, labels, verbose=0)
    assert layer.embedding.vocabularies["words"].stats()["num_keys"] == 0
    model.fit(inputs, labels, batch_size=16, epochs=8, verbose=0)
    stats = layer.embedding.vocabularies["words"].stats()
    assert (stats["num_keys"], stats["step"]) == (
        len(np.unique(inputs["text"])),
        32,
    )
    assert stats["keys_are"] == "strings"
    found = model.predict(inputs, verbose=0)
    assert np.mean((found - labels) ** 2) < before / 2
    model.predict(data(seed=5, most=90)[0], verbose=0)
    model.evaluate(*data(seed=5, most=90), verbose=0)
    assert layer.embedding.vocabularies["words"].stats() == stats
    model.save(tmp_path / "model.keras")
    loaded = version.models.load_model(tmp_path / "model.keras")
    assert (loaded.predict(inputs, verbose=0) == found).all()
    again, other = model_of(version, layer_class)
    model.save_weights(tmp_path / "model.weights.h5")
    again.load_weights(tmp_path / "model.weights.h5")
    assert (again.predict(inputs, verbose=0) == found).all()
    assert other.embedding.vocabularies["words"].stats() == stats
    # The loaded table continues training in the same way as the saved table.
    for one in (model, again):
        one.fit(*data(seed=7, most=60), batch_size=16, verbose=0, shuffle=False)
    assert (
        again.predict(inputs, verbose=0) == model.predict(inputs, verbose=0)
    ).all()


@pytest.mark.parametrize(("version", "layer_class"), VERSIONS)
def test_loading_a_table_with_ids_into_an_open_vocabulary_raises(
    tmp_path, version, layer_class
):
    model, _ = model_of(version, layer_class)
    model.save_weights(tmp_path / "model.weights.h5")
    counted, _ = model_of(version, layer_class, admission="count", min_count=2)
    with pytest.raises(ValueError, match="vocabulary_sketch"):
        counted.load_weights(tmp_path / "model.weights.h5")


def test_replicas_train_the_same_keys_as_one_device():
    """The table holds all keys, so only the order of rows differs."""

    def train(num_replicas):
        with strategies.mirrored(num_replicas).scope():
            # The keys are integers, because Keras cannot split batches of
            # strings.
            model, layer = model_of(keras, tlm.layers.TPUEmbedding, "int64")
        inputs, labels = data(dtype=np.int64)
        model.fit(
            inputs, labels, batch_size=16, epochs=2, verbose=0, shuffle=False
        )
        vocabulary = layer.embedding.vocabularies["words"]
        keys = np.sort(vocabulary.keys().numpy())
        rows = next(iter(layer.get_embedding_tables().values()))
        return keys, tf.gather(rows, vocabulary.lookup(keys)).numpy()

    (keys, rows), (expected_keys, expected) = train(2), train(1)
    assert (keys == expected_keys).all()
    # The mean over a batch is computed from the means over two halves, so it is
    # rounded differently.
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("version", "layer_class"), VERSIONS)
def test_a_resized_table_is_saved_with_its_new_size(
    tmp_path, version, layer_class
):
    model, layer = model_of(version, layer_class)
    inputs, labels = data()
    model.fit(inputs, labels, batch_size=16, verbose=0)
    layer.embedding.vocabularies["words"].resize(300)
    inputs, labels = data(most=200, seed=1)
    with pytest.raises(
        tf.errors.FailedPreconditionError,
        match="Keras models must be compiled again",
    ):
        model.fit(inputs, labels, batch_size=16, verbose=0)
    model.compile("sgd", "mse")
    model.fit(inputs, labels, batch_size=16, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = version.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(
        loaded.predict(inputs, verbose=0), model.predict(inputs, verbose=0)
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize(("version", "layer_class"), VERSIONS)
def test_a_checkpoint_continues_training_with_replicas(
    tmp_path, version, layer_class, is_half
):
    inputs, labels = data(dtype=np.int64)

    def trained(epochs):
        with strategies.mirrored(2).scope():
            model, _ = model_of(
                version,
                layer_class,
                "int64",
                table_dtypes="bfloat16" if is_half else "float32",
            )
        model.fit(inputs, labels, batch_size=16, epochs=epochs, verbose=0)
        return model, tf.train.Checkpoint(model=model)

    model, checkpoint = trained(2)
    path = checkpoint.write(tmp_path / "checkpoint")
    other, checkpoint = trained(1)
    checkpoint.read(path)
    np.testing.assert_array_equal(
        other.predict(inputs, verbose=0), model.predict(inputs, verbose=0)
    )
