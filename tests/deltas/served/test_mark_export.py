"""Tests `DeltaWriter.mark_export` for SavedModels without packed tables."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.deltas.served import cases

tpu = tf.tpu.experimental.embedding


class Served(tf.Module):
    """Module that contains the embedding with all its variables."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    @tf.function(input_signature=cases.signature())
    def serve(self, inputs):
        return self.embedding(inputs)


def values_of(path):
    """Returns all variables of a SavedModel, except save counters."""
    return {
        key: value
        for key, value in cases.stored(path).items()
        if not key.startswith("_CHECKPOINTABLE")
    }


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_saved_module_equals_a_new_one(num_shards, tmp_path):
    one = cases.embedding(num_shards=num_shards, oov_embedding="trainable")
    for step in range(3):
        cases.train(one, step)
    _, writer = cases.base_and_writer(one, tmp_path)
    tf.saved_model.save(Served(one), str(tmp_path / "model"))
    writer.mark_export(tmp_path / "model")
    served = tlm.deltas.ServedModel(tmp_path / "model")
    for step in range(3, 7):
        cases.train(one, step)
        one.vocabularies["words"].evict(np.arange(step, 400, 9))
        writer.write()
    tf.saved_model.save(Served(one), str(tmp_path / "fresh"))
    assert served.apply(tmp_path / "deltas") == 4
    tlm.deltas.update_export(
        tmp_path / "model", tmp_path / "deltas", tmp_path / "new"
    )
    # Slot variables, counts and steps of the keys are equal, too.
    wanted = values_of(tmp_path / "fresh")
    assert values_of(tmp_path / "new") == wanted
    for table, by_name in served.model.embedding._variables.items():
        for name, variable in by_name.items():
            key = f"embedding/_variables/{table}/{name}"
            assert (
                variable.numpy().tobytes()
                == wanted[f"{key}/.ATTRIBUTES/VARIABLE_VALUE"]
            ), key
    expected = one(cases.inputs())
    for name, value in served.model.serve(cases.inputs()).items():
        np.testing.assert_array_equal(value, expected[name])


def keras_model(num_layers=1):
    """Returns a model and its layers with open vocabularies."""
    ids = keras.Input([num_layers], dtype="int64", name="ids")
    layers = [
        tlm.layers.ShardedEmbedding(
            tlm.vocabulary.OpenVocabulary(60),
            4,
            optimizer="adagrad",
            num_shards=2,
            name=f"layer_{number}",
        )
        for number in range(num_layers)
    ]
    found = [
        layer(ids[:, number : number + 1])
        for number, layer in enumerate(layers)
    ]
    rows = keras.layers.Concatenate()([*found, found[0]])
    model = keras.Model(ids, keras.layers.Flatten()(rows))
    model.compile("sgd", "mse")
    return model, layers


def fit(model, layers, first):
    ids = np.stack(
        [np.arange(first, first + 24) * (i + 1) for i in range(len(layers))], 1
    )
    model.fit(
        ids, np.ones([24, 4 * (len(layers) + 1)]), batch_size=8, verbose=0
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_layers", [1, 2])
def test_an_export_of_keras_equals_a_new_one(num_layers, tmp_path):
    model, layers = keras_model(num_layers)
    fit(model, layers, 0)
    checkpoint = tf.train.Checkpoint(model=model)
    base = checkpoint.save(str(tmp_path / "base"))
    writer = tlm.deltas.DeltaWriter(
        layers if num_layers > 1 else layers[0],
        tmp_path / "deltas",
        base=base,
        root=checkpoint,
    )
    model.export(tmp_path / "model", verbose=False)
    writer.mark_export(tmp_path / "model")
    served = tlm.deltas.ServedModel(tmp_path / "model")
    for first in (10, 50, 90):
        fit(model, layers, first)
        writer.write()
    model.export(tmp_path / "fresh", verbose=False)
    assert served.apply(tmp_path / "deltas") == 3
    ids = np.stack([np.arange(300)] * num_layers, 1)
    fresh = tf.saved_model.load(str(tmp_path / "fresh"))
    wanted = fresh.serve(ids)
    assert len(np.unique(wanted, axis=0)) > 30
    np.testing.assert_array_equal(served.model.serve(ids), wanted)
    tlm.deltas.update_export(
        tmp_path / "model", tmp_path / "deltas", tmp_path / "new"
    )
    again = tf.saved_model.load(str(tmp_path / "new"))
    np.testing.assert_array_equal(again.serve(ids), wanted)


def test_a_model_that_was_trained_further_raises(tmp_path):
    one = cases.embedding()
    cases.train(one, 0)
    _, writer = cases.base_and_writer(one, tmp_path)
    tf.saved_model.save(Served(one), str(tmp_path / "model"))
    cases.train(one, 1)
    before = sorted((tmp_path / "model").rglob("*"))
    with pytest.raises(
        ValueError,
        match="must contain one variable that is equal to 'parameters' of "
        "table 'colors'.*Received: 0 of.*before the next training step",
    ):
        writer.mark_export(tmp_path / "model")
    assert sorted((tmp_path / "model").rglob("*")) == before


def test_another_folder_raises(tmp_path):
    one = cases.embedding()
    _, writer = cases.base_and_writer(one, tmp_path)
    with pytest.raises(ValueError, match="`path` must be the folder of a Sav"):
        writer.mark_export(tmp_path)


def test_an_export_during_a_write_raises(tmp_path, monkeypatch):
    one = cases.embedding()
    _, writer = cases.base_and_writer(one, tmp_path)
    monkeypatch.setattr(
        tf.saved_model,
        "save",
        lambda *args, _save=tf.saved_model.save, **kwargs: (
            writer.write(),
            _save(*args, **kwargs),
        ),
    )
    with pytest.raises(RuntimeError, match="No delta may be written during an"):
        cases.export(one, tmp_path / "model", delta_writer=writer)
    assert not (tmp_path / "model").exists()


def test_a_writer_of_other_tables_raises(tmp_path):
    one, other = cases.embedding(), cases.embedding()
    _, writer = cases.base_and_writer(other, tmp_path)
    with pytest.raises(
        ValueError, match="`delta_writer` must be a writer of tables"
    ):
        cases.export(one, tmp_path / "model", delta_writer=writer)
    with pytest.raises(
        TypeError, match="`delta_writer` must be a tlm.deltas.DeltaWriter"
    ):
        cases.export(one, tmp_path / "model", delta_writer="deltas")
    assert not (tmp_path / "model").exists()
