"""Checks that files move weights and optimizer state between meshes.

A model that is saved on one mesh is loaded on another mesh or without a mesh.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout import pairs
from tests.layout.meshes import axes_of, mesh_of
from tf_layoutmap.layout.keras3.variable import MeshVariable

X, Y = pairs.FEATURES, pairs.LABELS
# A model is saved and loaded without a mesh (None) or on a mesh with these
# axes.
PLACES = {
    "none": None,
    "2x2": dict(batch=2, model=2),
    "1x4": dict(batch=1, model=4),
}
WAYS = [("2x2", "none"), ("none", "2x2"), ("2x2", "1x4")]


def make():
    return pairs.sequential(
        (8,),
        keras.layers.Dense(16, use_bias=False, name="d1"),
        keras.layers.BatchNormalization(name="bn"),
    )


AXES = {
    "d1.kernel": (None, "model"),
    "bn.gamma": ("model",),
    "d2.kernel": ("model", None),
}


def at(place, builder=make):
    if PLACES[place] is None:
        return pairs.plain(builder)
    return pairs.on_mesh(builder, AXES, mesh_of(**PLACES[place]))


def build_under(place, builder):
    """Calls `builder` under the scope of `place`, if `place` has a mesh."""
    return (
        builder()
        if PLACES[place] is None
        else pairs.on_mesh(builder, AXES, mesh_of(**PLACES[place]))
    )


def check_place(model, place):
    for variable in model.weights:
        assert isinstance(variable, MeshVariable) == (place != "none")
    if place != "none":
        assert axes_of(model.get_layer("d1").kernel) == (None, "model")


def trained(place):
    model = at(place)
    pairs.fit(model, epochs=1)
    return model


@pytest.fixture(scope="module")
def written():
    return {place: trained(place) for place in PLACES}


def assert_training_continues_alike(first, second):
    """Checks that one more epoch gives the same losses for both models."""
    snapshot = [v.numpy() for v in (*first.weights, *first.optimizer.variables)]
    options = dict(batch_size=8, shuffle=False, verbose=0)
    losses = [m.fit(X, Y, **options).history["loss"] for m in (first, second)]
    np.testing.assert_allclose(*losses, **pairs.TOLERANCE)
    for variable, value in zip(
        (*first.weights, *first.optimizer.variables), snapshot
    ):
        variable.assign(value)


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize(("writer", "reader"), WAYS)
def test_h5_weights_move_between_meshes(written, tmp_path, writer, reader):
    path = tmp_path / "model.weights.h5"
    source = written[writer]
    source.save_weights(path)
    model = at(reader)
    model.compile(keras.optimizers.Adam(0.01), pairs.loss())
    model.optimizer.build(model.trainable_variables)
    model.load_weights(path)
    check_place(model, reader)
    # Saving and loading do not change values, so they are bitwise identical.
    pairs.assert_same_weights(source, model, rtol=0, atol=0)


@pytest.mark.covering(1, 1)
@pytest.mark.filterwarnings("ignore:.*nested container")
@pytest.mark.parametrize(("writer", "reader"), WAYS)
def test_keras_format_moves_between_meshes(written, tmp_path, writer, reader):
    path = tmp_path / "model.keras"
    source = written[writer]
    source.save(path)
    model = build_under(reader, lambda: keras.saving.load_model(path))
    check_place(model, reader)
    pairs.assert_same_weights(source, model, rtol=0, atol=0)
    for slot in model.optimizer.variables:
        assert isinstance(slot, MeshVariable) == (reader != "none")
    if reader != "none":
        assert pairs.assert_slots_have_layouts_of_weights(model) > 0
    assert_training_continues_alike(source, model)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("writer", "reader"), WAYS)
@pytest.mark.parametrize("built", ["before", "after"])
def test_tf_checkpoint_moves_between_meshes(
    written, tmp_path, writer, reader, built
):
    source = written[writer]
    prefix = tf.train.Checkpoint(model=source, optimizer=source.optimizer).save(
        tmp_path / "ckpt"
    )
    model = at(reader)
    model.compile(keras.optimizers.Adam(0.01), pairs.loss())
    if built == "before":
        model.optimizer.build(model.trainable_variables)
    status = tf.train.Checkpoint(
        model=model, optimizer=model.optimizer
    ).restore(prefix)
    if built == "after":
        model.optimizer.build(model.trainable_variables)
    status.assert_existing_objects_matched()
    check_place(model, reader)
    pairs.assert_same_weights(source, model, rtol=0, atol=0)


def test_exported_model_runs_without_a_mesh(written, tmp_path):
    source = written["2x2"]
    expected = source.predict(X, verbose=0)
    source.export(tmp_path / "served", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "served")
    np.testing.assert_allclose(
        loaded.serve(X).numpy(), expected, **pairs.TOLERANCE
    )
    # After the export, the original model must still work on its mesh.
    np.testing.assert_array_equal(source.predict(X, verbose=0), expected)


def test_exported_convolutions_contain_no_dtensor_ops(tmp_path):
    model = pairs.on_mesh(
        lambda: pairs.sequential(
            (8, 8, 3), keras.layers.Conv2D(2, 3), keras.layers.MaxPooling2D()
        ),
        {"d2.kernel": ("model", None)},
    )
    expected = model.predict(pairs.IMAGES, verbose=0)
    model.export(tmp_path / "served", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "served")
    np.testing.assert_allclose(
        loaded.serve(pairs.IMAGES).numpy(), expected, **pairs.TOLERANCE
    )


def test_get_and_set_weights_move_between_meshes(written):
    model = at("1x4")
    model.set_weights(written["2x2"].get_weights())
    for a, b in zip(written["2x2"].weights, model.weights):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.exhaustive
@pytest.mark.slow
def test_callbacks_save_and_resume_training(tmp_path):
    def run(epochs, model):
        return pairs.fit(
            model,
            epochs=epochs,
            callbacks=[
                keras.callbacks.BackupAndRestore(
                    tmp_path / "backup", delete_checkpoint=False
                ),
                keras.callbacks.ModelCheckpoint(
                    tmp_path / "best.weights.h5", save_weights_only=True
                ),
            ],
        )

    uninterrupted = at("2x2")
    expected = pairs.fit(uninterrupted, epochs=3)["loss"]
    run(2, at("2x2"))
    resumed = at("1x4")
    assert len(run(3, resumed)["loss"]) == 1
    np.testing.assert_allclose(
        resumed.history.history["loss"], expected[2:], **pairs.TOLERANCE
    )
    again = at("none")
    again.load_weights(tmp_path / "best.weights.h5")
    for a, b in zip(resumed.weights, again.weights):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def with_tables(place):
    """Returns a model, a sliced table and the table of the model's layer."""

    def builder():
        return keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                tlm.layers.ShardedEmbedding(
                    16, 8, optimizer="adagrad", name="e"
                ),
                keras.layers.Flatten(),
                keras.layers.Dense(4, name="d1"),
            ]
        )

    axes = {"e.embeddings": ("model", None), "d1.kernel": (None, "model")}
    model = (
        pairs.plain(builder)
        if PLACES[place] is None
        else pairs.on_mesh(builder, axes, mesh_of(**PLACES[place]))
    )
    table = tlm.ShardedVariable(
        [tf.Variable(np.full([n, 3], n, np.float32)) for n in (3, 2)]
    )
    model.compile(keras.optimizers.Adam(0.01), pairs.loss())
    return (
        model,
        table,
        tf.train.Checkpoint(
            model=model, optimizer=model.optimizer, table=table
        ),
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(("writer", "reader"), WAYS)
def test_sliced_tables_and_mesh_variables_share_a_checkpoint(
    tmp_path, writer, reader
):
    source, table, checkpoint = with_tables(writer)
    options = dict(batch_size=8, shuffle=False, verbose=0)
    source.fit(pairs.TOKENS, Y, **options)
    rows = tf.convert_to_tensor(table).numpy()
    prefix = checkpoint.save(tmp_path / "ckpt")
    model, other, checkpoint = with_tables(reader)
    for part in other.variables:
        part.assign(tf.zeros_like(part))
    model.optimizer.build(model.trainable_variables)
    checkpoint.restore(prefix).assert_existing_objects_matched()
    np.testing.assert_array_equal(tf.convert_to_tensor(other), rows)
    pairs.assert_same_weights(source, model, rtol=0, atol=0)
    losses = [
        m.fit(pairs.TOKENS, Y, **options).history["loss"]
        for m in (source, model)
    ]
    np.testing.assert_allclose(*losses, **pairs.TOLERANCE)


def test_checkpoint_of_a_sharded_variable_is_one_full_tensor(tmp_path):
    source = trained("2x2")
    prefix = tf.train.Checkpoint(w=source.get_layer("d1").kernel.value).save(
        tmp_path / "ckpt"
    )
    plain = tf.Variable(tf.zeros([8, 16]))
    tf.train.Checkpoint(w=plain).restore(prefix).assert_consumed()
    expected = source.get_layer("d1").kernel.numpy()
    np.testing.assert_array_equal(plain, expected)
    np.testing.assert_array_equal(
        tf.train.load_checkpoint(prefix).get_tensor(
            "w/.ATTRIBUTES/VARIABLE_VALUE"
        ),
        expected,
    )


@pytest.mark.exhaustive
def test_checkpoint_with_another_shape_raises(tmp_path):
    source = trained("2x2")
    for name, wrong in (("bn.gamma", [4]), ("d1.kernel", [8, 4])):
        layer, weight = name.split(".")
        variable = getattr(source.get_layer(layer), weight)
        before = variable.numpy()
        prefix = tf.train.Checkpoint(w=tf.Variable(tf.zeros(wrong))).save(
            tmp_path / layer
        )
        with pytest.raises((ValueError, tf.errors.OpError)):
            tf.train.Checkpoint(w=variable.value).restore(prefix)
        np.testing.assert_array_equal(variable.numpy(), before)
