"""Tests layers with a shared open vocabulary, in both Keras versions."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding
VERSIONS = [
    (keras, tlm.layers.TPUEmbedding, tlm.layers.VocabularyLogger),
    (
        tf_keras,
        tlm.layers.tf_keras.TPUEmbedding,
        tlm.layers.tf_keras.VocabularyLogger,
    ),
]


def model_of(version, layer_class, owners=("deep",)):
    """Returns a wide and deep model on strings.

    Args:
      version: keras or tf_keras.
      layer_class: The `TPUEmbedding` layer.
      owners: Tables that own a vocabulary.
    """
    tables = {
        name: tpu.TableConfig(
            100,
            dim,
            initializer=tf.random_uniform_initializer(-1.0, 1.0),
            combiner="sum",
            name=name,
        )
        for name, dim in {"wide": 1, "deep": 4}.items()
    }
    layer = layer_class(
        {name: tpu.FeatureConfig(table) for name, table in tables.items()},
        tpu.Adagrad(0.5),
        vocabularies={
            name: tlm.vocabulary.OpenVocabulary(100)
            if name in owners
            else owners[0]
            for name in tables
        },
    )
    words = version.Input([3], dtype="string", name="text")
    found = layer({"wide": words, "deep": words})
    outputs = version.layers.Add()(
        [version.layers.Dense(1)(found["deep"]), found["wide"]]
    )
    model = version.Model(words, outputs)
    model.compile(version.optimizers.SGD(0.01), "mse")
    return model, layer


def data():
    words = np.random.default_rng(0).integers(0, 40, [64, 3])
    return (
        tf.constant(words.astype(str)),
        tf.constant(words.sum(1, keepdims=True) / 40, tf.float32),
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(("version", "layer_class", "logger"), VERSIONS)
def test_a_wide_and_deep_model_trains_and_is_saved(
    tmp_path, version, layer_class, logger
):
    model, layer = model_of(version, layer_class)
    inputs, labels = data()
    history = model.fit(
        inputs,
        labels,
        batch_size=16,
        epochs=8,
        verbose=0,
        callbacks=[logger(layer, names=["num_keys", "num_lookups"])],
    ).history
    assert history["loss"][-1] < history["loss"][0] / 2
    # Each of 64 x 3 ids is counted once in an epoch.
    assert history["deep/num_lookups"] == [192.0] * 8
    assert not any(name.startswith("wide/") for name in history)
    vocabularies = layer.embedding.vocabularies
    assert vocabularies["wide"].stats() == vocabularies["deep"].stats()
    assert vocabularies["wide"].stats()["num_keys"] == len(np.unique(inputs))
    expected = model.predict(inputs, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = version.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(inputs, verbose=0), expected)
    again, other = model_of(version, layer_class)
    model.save_weights(tmp_path / "model.weights.h5")
    again.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(again.predict(inputs, verbose=0), expected)
    for one in (model, loaded, again):
        one.fit(inputs, labels, batch_size=16, verbose=0, shuffle=False)
    np.testing.assert_array_equal(
        again.predict(inputs, verbose=0), model.predict(inputs, verbose=0)
    )
    np.testing.assert_array_equal(
        loaded.predict(inputs, verbose=0), model.predict(inputs, verbose=0)
    )
    other.embedding.vocabularies["wide"].resize(300)
    again.compile(version.optimizers.SGD(0.01), "mse")
    before = again.predict(inputs, verbose=0)
    again.save(tmp_path / "resized.keras")
    loaded = version.models.load_model(tmp_path / "resized.keras")
    np.testing.assert_array_equal(loaded.predict(inputs, verbose=0), before)


@pytest.mark.parametrize(("version", "layer_class", "logger"), VERSIONS)
@pytest.mark.parametrize("owners", [("wide",), ("wide", "deep")])
def test_weights_with_other_vocabularies_raise(
    tmp_path, version, layer_class, logger, owners
):
    model, _ = model_of(version, layer_class)
    model.save_weights(tmp_path / "model.weights.h5")
    other, _ = model_of(version, layer_class, owners)
    with pytest.raises(ValueError, match="vocabulary_keys"):
        other.load_weights(tmp_path / "model.weights.h5")
