"""Tests layers with open-vocabulary tables, in both Keras versions."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm
from tests import strategies
from tf_layoutmap.layers.base import weight_files

tpu = tf.tpu.experimental.embedding
VERSIONS = [
    (keras, tlm.layers.TPUEmbedding),
    (tf_keras, tlm.layers.tf_keras.TPUEmbedding),
]


def model_of(
    version,
    layer_class,
    dtype="string",
    table_dtypes=None,
    packed=False,
    capacity=100,
    **settings,
):
    words = tpu.TableConfig(
        capacity,
        4,
        initializer=tf.random_uniform_initializer(-1.0, 1.0),
        combiner="sum",
        name="words",
    )
    layer = layer_class(
        {"text": tpu.FeatureConfig(words)},
        tpu.Adagrad(0.5),
        table_dtypes=table_dtypes,
        vocabularies={
            "words": tlm.vocabulary.OpenVocabulary(capacity, **settings)
        },
    )
    inputs = (
        version.Input([None], dtype="int64", name="packed")
        if packed
        else {"text": version.Input([3], dtype=dtype, name="text")}
    )
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


@pytest.mark.covering(1, 1)
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
    assert stats["key_type"] == "strings"
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


@pytest.mark.exhaustive
@pytest.mark.parametrize(("version", "layer_class"), VERSIONS)
@pytest.mark.parametrize("form", ["integers", "strings", "dataset", "packed"])
def test_replicas_train_the_same_keys_as_one_device(version, layer_class, form):
    """The table holds all keys, so only the order of rows differs."""

    def train(num_replicas):
        dtype = np.int64 if form == "integers" else str
        with strategies.mirrored(num_replicas).scope():
            model, layer = model_of(
                version,
                layer_class,
                "int64" if form == "integers" else "string",
                packed=form == "packed",
            )
        inputs, labels = data(dtype=dtype)
        batches = tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(16)
        if form == "packed":
            batches = batches.map(lambda x, y: (tlm.pack(x), y))
        if form in ("dataset", "packed"):
            model.fit(batches, epochs=2, verbose=0)
            model.evaluate(batches, verbose=0)
            model.predict(batches.map(lambda x, y: x), verbose=0)
        else:
            model.fit(
                inputs,
                labels,
                batch_size=16,
                epochs=2,
                verbose=0,
                shuffle=False,
            )
            model.evaluate(inputs, labels, verbose=0)
            model.predict(inputs, verbose=0)
        vocabulary = layer.embedding.vocabularies["words"]
        rows = next(iter(layer.get_embedding_tables().values()))
        ids = np.unique(inputs["text"])
        assert vocabulary.contains(ids).numpy().all()
        return (
            np.sort(vocabulary.keys().numpy()),
            tf.gather(rows, vocabulary.lookup(ids)).numpy(),
        )

    (keys, rows), (expected_keys, expected) = train(2), train(1)
    assert (keys == expected_keys).all()
    # The mean over a batch is computed from the means over two halves, so it is
    # rounded differently.
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("version", "layer_class"), VERSIONS)
@pytest.mark.parametrize("name", ["model.weights.h5", "model.keras"])
@pytest.mark.parametrize("capacity", [2000, 24])
@pytest.mark.parametrize("table_dtypes", [None, "bfloat16"])
def test_a_file_loads_into_another_capacity_as_a_converted_checkpoint(
    tmp_path, version, layer_class, name, capacity, table_dtypes
):
    settings = {
        "admission": "count",
        "min_count": 2,
        "table_dtypes": table_dtypes,
    }
    model, layer = model_of(version, layer_class, **settings)
    inputs, labels = data(most=60)
    model.fit(inputs, labels, batch_size=16, verbose=0, shuffle=False)
    path = str(tmp_path / name)
    if name.endswith(".keras"):
        model.save(path)
    else:
        model.save_weights(path)
    source = tf.train.Checkpoint(layer.embedding).write(str(tmp_path / "old"))
    target = str(tmp_path / "new")
    settings["capacity"] = capacity
    converted = tlm.vocabulary.convert(
        source,
        target,
        {
            "words": tlm.vocabulary.OpenVocabulary(
                capacity, admission="count", min_count=2
            )
        },
    )["words"]
    _, other = model_of(version, layer_class, **settings)
    tf.train.Checkpoint(other.embedding).read(
        target
    ).assert_existing_objects_matched()
    loaded, one = model_of(version, layer_class, **settings)
    if converted.num_dropped:
        with pytest.warns(
            UserWarning,
            match=f"has no rows for {converted.num_dropped} of the ",
        ):
            loaded.load_weights(path)
    else:
        loaded.load_weights(path)
    for found, expected in zip(
        weight_files.variables_by_key(one.embedding).items(),
        weight_files.variables_by_key(other.embedding).items(),
        strict=True,
    ):
        assert found[0] == expected[0]
        np.testing.assert_array_equal(found[1].numpy(), expected[1].numpy())
    vocabulary = one.embedding.vocabularies["words"]
    assert vocabulary.stats()["num_keys"] == converted.num_kept
    assert (capacity == 24) == (converted.num_dropped > 0)
    assert one.embedding.vocabularies["words"].settings.capacity == capacity


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
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
