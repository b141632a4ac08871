"""What happens to vocabularies, among the logs of both Keras."""

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
        {"ids": tpu.FeatureConfig(tpu.TableConfig(
            64, 2, initializer=tf.ones, name="words"))}, tpu.SGD(0.1),
        vocabularies={"words": tlm.OpenVocabulary(64)})
    inputs = {"ids": version.Input([2], dtype="int64", name="ids")}
    model = version.Model(
        inputs, version.layers.Dense(1)(layer(inputs)["ids"]))
    model.compile("sgd", "mse")
    return model, layer


@pytest.mark.parametrize(("version", "layers"), VERSIONS)
def test_epochs_tell_what_happened_in_them(tmp_path, version, layers, capsys):
    model, layer = model_of(version, layers)
    names = ("load", "num_keys", "share_known", "num_admitted", "num_lookups")
    logger = layers.VocabularyLogger(layer, str(tmp_path), names)
    ids = {"ids": np.arange(64).reshape(32, 2)}
    history = model.fit(ids, np.zeros([32, 1]), batch_size=8, epochs=2,
                        verbose=2, callbacks=[logger]).history
    keys = history["words/num_keys"][-1]
    assert history["words/load"] == [keys / 64, keys / 64]
    assert history["words/num_admitted"] == [64.0, 64.0 - keys]
    assert history["words/num_lookups"] == [64.0, 64.0]
    assert history["words/share_known"] == [0.0, keys / 64]
    assert "words/share_known" in capsys.readouterr().out
    events = [
        value for file in tmp_path.glob("events*")
        for record in tf.compat.v1.train.summary_iterator(str(file))
        for value in record.summary.value]
    assert {one.tag for one in events} == {
        f"vocabulary/words/{name}" for name in names}
    assert len(events) == 2 * len(names)


@pytest.mark.parametrize(("version", "layers"), VERSIONS)
def test_the_table_of_a_sharded_embedding_has_the_name_of_the_layer(
        version, layers):
    layer = layers.ShardedEmbedding(
        tlm.OpenVocabulary(64), 2, optimizer="sgd", name="words")
    model = version.Sequential([version.Input([2], dtype="int64"), layer])
    model.compile("sgd", "mse")
    history = model.fit(
        np.arange(8).reshape(4, 2), np.zeros([4, 2, 2]), verbose=0,
        callbacks=[layers.VocabularyLogger(layer)]).history
    assert history["words/load"] == [8 / 64]


@pytest.mark.parametrize(("version", "layers"), VERSIONS)
def test_what_no_logger_can_tell(version, layers):
    _, layer = model_of(version, layers)
    with pytest.raises(ValueError, match="`names` must be one of"):
        layers.VocabularyLogger(layer, names=["size"])
    with pytest.raises(TypeError, match="`layer` must be a tlm.layers"):
        layers.VocabularyLogger(version.layers.Dense(1))
