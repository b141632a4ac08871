"""Tests `VocabularyLogger` in both Keras versions."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding
VERSIONS = [(keras, tlm.layers), (tf_keras, tlm.layers.tf_keras)]


def model_of(version, layers):
    layer = layers.TPUEmbedding(
        {
            "ids": tpu.FeatureConfig(
                tpu.TableConfig(64, 2, initializer=tf.ones, name="words")
            )
        },
        tpu.SGD(0.1),
        vocabularies={"words": tlm.vocabulary.OpenVocabulary(64)},
    )
    inputs = {"ids": version.Input([2], dtype="int64", name="ids")}
    model = version.Model(inputs, version.layers.Dense(1)(layer(inputs)["ids"]))
    model.compile("sgd", "mse")
    return model, layer


@pytest.mark.parametrize(("version", "layers"), VERSIONS)
def test_epoch_logs_contain_vocabulary_counts(
    tmp_path, version, layers, capsys
):
    model, layer = model_of(version, layers)
    names = ("load", "num_keys", "hit_rate", "num_admitted", "num_lookups")
    logger = layers.VocabularyLogger(layer, str(tmp_path), names)
    ids = {"ids": np.arange(64).reshape(32, 2)}
    history = model.fit(
        ids,
        np.zeros([32, 1]),
        batch_size=8,
        epochs=2,
        verbose=2,
        callbacks=[logger],
    ).history
    keys = history["words/num_keys"][-1]
    assert history["words/load"] == [keys / 64, keys / 64]
    assert history["words/num_admitted"] == [64.0, 64.0 - keys]
    assert history["words/num_lookups"] == [64.0, 64.0]
    assert history["words/hit_rate"] == [0.0, keys / 64]
    assert "words/hit_rate" in capsys.readouterr().out
    events = [
        value
        for file in tmp_path.glob("events*")
        for record in tf.compat.v1.train.summary_iterator(str(file))
        for value in record.summary.value
    ]
    assert {one.tag for one in events} == {
        f"vocabulary/words/{name}" for name in names
    }
    assert len(events) == 2 * len(names)


@pytest.mark.parametrize(("version", "layers"), VERSIONS)
def test_the_logged_name_of_a_sharded_embedding_is_its_layer_name(
    version, layers
):
    layer = layers.ShardedEmbedding(
        tlm.vocabulary.OpenVocabulary(64), 2, optimizer="sgd", name="words"
    )
    model = version.Sequential([version.Input([2], dtype="int64"), layer])
    model.compile("sgd", "mse")
    history = model.fit(
        np.arange(8).reshape(4, 2),
        np.zeros([4, 2, 2]),
        verbose=0,
        callbacks=[layers.VocabularyLogger(layer)],
    ).history
    assert history["words/load"] == [8 / 64]


@pytest.mark.parametrize(("version", "layers"), VERSIONS)
def test_the_progress_bar_shows_totals_over_all_tables(
    version, layers, tmp_path, capsys
):
    names = [f"table{number}" for number in range(6)]
    layer = layers.TPUEmbedding(
        {
            name: tpu.FeatureConfig(
                tpu.TableConfig(
                    8 * number + 8, 2, initializer=tf.ones, name=name
                )
            )
            for number, name in enumerate(names)
        },
        tpu.SGD(0.1),
        vocabularies={
            name: tlm.vocabulary.OpenVocabulary(8 * number + 8)
            for number, name in enumerate(names)
        },
    )
    inputs = {
        name: version.Input([1], dtype="int64", name=name) for name in names
    }
    found = layer(inputs)
    model = version.Model(
        inputs, version.layers.Add()([found[name] for name in names])
    )
    model.compile("sgd", "mse")
    ids = {
        name: np.array([[1], [2], [number % 2 + 1], [number]])
        for number, name in enumerate(names)
    }
    history = model.fit(
        ids,
        np.zeros([4, 2]),
        batch_size=2,
        verbose=2,
        shuffle=False,
        callbacks=[
            layers.VocabularyLogger(
                layer,
                str(tmp_path),
                names=["load", "hit_rate", "num_lookups", "num_keys"],
            )
        ],
    ).history
    shown = capsys.readouterr().out
    assert "vocabularies/load" in shown
    assert "table0/load" not in shown
    numbers = {
        name: [history[f"{table}/{name}"] for table in names]
        for name in ("num_lookups", "num_keys", "load", "hit_rate")
    }
    assert history["vocabularies/num_lookups"] == [24.0]
    keys = sum(one for (one,) in numbers["num_keys"])
    assert history["vocabularies/num_keys"] == [keys]
    assert history["vocabularies/load"] == [keys / (8 * 21)]
    assert history["vocabularies/hit_rate"] == [
        pytest.approx(np.mean(numbers["hit_rate"]))
    ]
    tags = {
        value.tag
        for file in tmp_path.glob("events*")
        for record in tf.compat.v1.train.summary_iterator(str(file))
        for value in record.summary.value
    }
    assert "vocabulary/table5/load" in tags


@pytest.mark.parametrize("kind", ["sharded", "tpu"])
@pytest.mark.parametrize(("version", "layers"), VERSIONS)
def test_a_model_built_by_fit_is_logged_from_its_first_epoch(
    version, layers, kind
):
    layer = (
        layers.ShardedEmbedding(
            tlm.vocabulary.OpenVocabulary(64),
            2,
            optimizer="sgd",
            name="words",
        )
        if kind == "sharded"
        else layers.TPUEmbedding(
            tpu.FeatureConfig(
                tpu.TableConfig(64, 2, initializer=tf.ones, name="words")
            ),
            tpu.SGD(0.1),
            vocabularies={"words": tlm.vocabulary.OpenVocabulary(64)},
        )
    )

    class Words(version.Model):
        def __init__(self):
            super().__init__()
            self.words = layer

        def call(self, ids):
            return self.words(ids)

    model = Words()
    model.compile("sgd", "mse")
    shape = [4, 1, 2] if kind == "sharded" else [4, 2]
    history = model.fit(
        np.arange(4, dtype=np.int64).reshape(4, 1),
        np.zeros(shape),
        verbose=0,
        callbacks=[
            layers.VocabularyLogger(layer, names=["num_keys", "num_lookups"])
        ],
    ).history
    assert history["words/num_keys"] == history["words/num_lookups"] == [4.0]


@pytest.mark.parametrize(("version", "layers"), VERSIONS)
def test_invalid_logger_arguments_raise(version, layers):
    _, layer = model_of(version, layers)
    with pytest.raises(ValueError, match="`names` must be one of"):
        layers.VocabularyLogger(layer, names=["size"])
    with pytest.raises(TypeError, match="`layer` must be a tlm.layers"):
        layers.VocabularyLogger(version.layers.Dense(1))


@pytest.mark.parametrize(("version", "layers"), VERSIONS)
def test_a_layer_without_a_vocabulary_warns_once(version, layers):
    layer = layers.ShardedEmbedding(64, 2, name="words")
    model = version.Sequential([version.Input([2], dtype="int64"), layer])
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="'words' has no open voc") as warned:
        model.fit(
            np.arange(8).reshape(4, 2),
            np.zeros([4, 2, 2]),
            epochs=2,
            verbose=0,
            callbacks=[layers.VocabularyLogger(layer)],
        )
    assert sum("VocabularyLogger" in str(one.message) for one in warned) == 1
