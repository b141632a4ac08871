"""Deltas contain the weights of a model in addition to rows of its tables."""

import threading
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm
from tests.deltas.served import cases
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.deltas.served import chain

# The cases build, train and export models.
pytestmark = pytest.mark.slow
VERSIONS = {
    "keras3": (keras, tlm.layers),
    "tf_keras": (tf_keras, tlm.layers.tf_keras),
}
IDS = np.arange(64).reshape(32, 2)
LABELS = np.sin(np.arange(32.0))[:, np.newaxis]


def model_of(version="keras3", *, is_large=False):
    """Returns a compiled model.

    A large model contains all kinds of tables and layers with statistics.
    """
    keras_of, layers = VERSIONS[version]
    ids = keras_of.Input([2], dtype="int64", name="ids")
    words = layers.ShardedEmbedding(
        tlm.vocabulary.OpenVocabulary(80), 8, optimizer="adagrad", name="words"
    )
    x = keras_of.layers.Flatten()(words(ids))
    if is_large:
        closed = layers.ShardedEmbedding(
            64, 8, optimizer="adagrad", name="closed", num_shards=2
        )
        plain = layers.ShardedEmbedding(64, 8, name="plain", num_shards=2)
        found = [keras_of.layers.Flatten()(one(ids)) for one in (closed, plain)]
        x = keras_of.layers.Concatenate()([x, *found])
        x = keras_of.layers.Dense(8, "relu")(x)
        x = keras_of.layers.BatchNormalization(momentum=0.5)(x)
        inner = keras_of.Sequential(
            [
                keras_of.layers.Dense(8, "relu"),
                keras_of.layers.Dropout(0.1),
            ]
        )
        x = inner(x)
    out = keras_of.layers.Dense(1, name="out")(x)
    model = keras_of.Model(ids, out)
    model.compile(keras_of.optimizers.Adam(0.02), "mse")
    return model


def fit(model, epochs=1):
    model.fit(IDS, LABELS, batch_size=8, epochs=epochs, verbose=0)


def predict(model):
    return np.array(model(IDS, training=False))


def mse(found):
    return float(np.mean((np.asarray(found) - LABELS) ** 2))


def base_and_writer(model, folder, **options):
    base = tf.train.Checkpoint(model=model).save(str(folder / "base"))
    writer = tlm.deltas.DeltaWriter(
        model, folder / "deltas", base=base, **options
    )
    return base, writer


def export(model, writer, folder, kind="float32"):
    if kind == "model.export":
        model.export(folder, verbose=False)
        writer.mark_export(folder)
    else:
        tlm.export(model, folder, kind, delta_writer=writer)
    return folder


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize(
    ("version", "kind"),
    [
        pytest.param("keras3", "float32", marks=pytest.mark.exhaustive),
        pytest.param("keras3", "int8", marks=pytest.mark.exhaustive),
        ("keras3", "model.export"),
        ("tf_keras", "float16"),
    ],
)
def test_a_served_model_equals_the_trained_model(version, kind, tmp_path):
    VERSIONS[version][0].utils.set_random_seed(1)
    model = model_of(version, is_large=True)
    fit(model)
    base, writer = base_and_writer(model, tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Deltas of this writer do not change")
        path = export(model, writer, tmp_path / "1", kind)
    served, kept = (tlm.deltas.ServedModel(path) for _ in range(2))
    for number in (1, 2, 3):
        fit(model, 5)
        assert writer.write().meta.sequence == number
        fresh = tmp_path / f"fresh{number}"
        if kind == "model.export":
            model.export(fresh, verbose=False)
        else:
            tlm.export(model, fresh, kind)
        loaded = tf.saved_model.load(str(fresh))
        wanted = loaded.serve(IDS).numpy()
        before = served.model.serve(IDS).numpy()
        assert served.apply(tmp_path / "deltas") == number
        found = served.model.serve(IDS).numpy()
        np.testing.assert_array_equal(found, wanted)
        assert np.any(found != before)
    assert abs(mse(found) - mse(predict(model))) < 1e-3
    # One call applies all deltas; the weights are in their last delta.
    tlm.deltas.merge([one.path for one in writer.deltas], tmp_path / "merged")
    assert kept.apply([tmp_path / "merged"]) == 3
    np.testing.assert_array_equal(kept.model.serve(IDS), wanted)
    tlm.deltas.prune(tmp_path / "deltas", keep=1)
    assert (
        tlm.deltas.update_export(path, tmp_path / "deltas", tmp_path / "2") == 3
    )
    updated = tf.saved_model.load(str(tmp_path / "2"))
    np.testing.assert_array_equal(updated.serve(IDS), wanted)
    # The copy and the writer continue.
    again = tlm.deltas.ServedModel(tmp_path / "2")
    fit(model)
    writer.write()
    assert again.apply(tmp_path / "deltas") == 4
    assert mse(again.model.serve(IDS)) == pytest.approx(
        mse(predict(model)), abs=1e-3
    )
    # The full checkpoint contains the state of the optimizer, too.
    expected = tf.train.Checkpoint(model=model).save(str(tmp_path / "expected"))
    full = tlm.deltas.apply(base, tmp_path / "deltas")
    found, wanted = map(tf.train.load_checkpoint, (full, expected))
    for key in wanted.get_variable_to_shape_map():
        if key.endswith("VARIABLE_VALUE") and "save_counter" not in key:
            np.testing.assert_array_equal(
                found.get_tensor(key), wanted.get_tensor(key), key
            )


def test_only_weights_that_changed_are_written(tmp_path):
    model = model_of(is_large=True)
    fit(model)
    _, writer = base_and_writer(model, tmp_path)
    first = writer.write()
    # The base does not contain the seed of the dropout layer.
    assert [
        one["key"] for one in first.meta.weights.values() if one["is_changed"]
    ] == [""]
    kernel = model.get_layer("out").kernel
    kernel.assign(kernel + 1)
    second = writer.write()
    (label,) = [
        label for label, one in second.meta.weights.items() if one["is_changed"]
    ]
    reader = tf.train.load_checkpoint(second.tensors)
    np.testing.assert_array_equal(
        reader.get_tensor(chain.weight_tensor(label)), kernel
    )
    assert second.meta.weights[label]["key"].endswith(
        "_kernel/.ATTRIBUTES/VARIABLE_VALUE"
    )
    # A merged delta contains a weight that one of its deltas has changed.
    third = writer.write()
    assert not third.meta.weights[label]["is_changed"]
    merged = tlm.deltas.merge([second.path, third.path], tmp_path / "merged")
    assert merged.meta.weights[label]["is_changed"]
    np.testing.assert_array_equal(
        tf.train.load_checkpoint(merged.tensors).get_tensor(
            chain.weight_tensor(label)
        ),
        kernel,
    )


@pytest.mark.exhaustive
def test_an_export_of_other_weights_is_corrected_by_the_next_delta(tmp_path):
    model = model_of()
    fit(model)
    _, writer = base_and_writer(model, tmp_path)
    writer.write()
    kernel = model.get_layer("out").kernel
    value = kernel.numpy()
    kernel.assign(value + 1)
    served = tlm.deltas.ServedModel(export(model, writer, tmp_path / "1"))
    # Simulates that the program restores the weights of the last delta.
    kernel.assign(value)
    writer.write()
    served.apply(tmp_path / "deltas")
    np.testing.assert_array_equal(served.model.serve(IDS), predict(model))


@pytest.mark.exhaustive
def test_a_restarted_writer_continues(tmp_path):
    model = model_of()
    fit(model)
    base, writer = base_and_writer(model, tmp_path)
    path = export(model, writer, tmp_path / "1")
    served = tlm.deltas.ServedModel(path)
    fit(model)
    writer.write()
    full = tlm.deltas.apply(base, tmp_path / "deltas")
    again = model_of()
    fit(again)
    tf.train.Checkpoint(model=again).read(full).expect_partial()
    layer = again.layers[1]
    with pytest.raises(ValueError, match="weights that this writer does not"):
        tlm.deltas.DeltaWriter(layer, tmp_path / "deltas", base=base)
    writer = tlm.deltas.DeltaWriter(again, tmp_path / "deltas", base=base)
    served.apply(tmp_path / "deltas")
    np.testing.assert_array_equal(served.model.serve(IDS), predict(again))
    fit(again, 2)
    writer.write()
    served.apply(tmp_path / "deltas")
    np.testing.assert_array_equal(served.model.serve(IDS), predict(again))


@pytest.mark.exhaustive
def test_the_root_of_the_base_contains_the_weights(tmp_path):
    model = model_of(is_large=True)
    fit(model)
    checkpoint = tf.train.Checkpoint(net=model)
    base = checkpoint.save(str(tmp_path / "base"))
    words = model.get_layer("words")
    writer = tlm.deltas.DeltaWriter(
        words, tmp_path / "deltas", base=base, root=checkpoint
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Deltas of this writer do not change")
        served = tlm.deltas.ServedModel(export(model, writer, tmp_path / "1"))
    fit(model)
    writer.write()
    served.apply(tmp_path / "deltas")
    np.testing.assert_array_equal(served.model.serve(IDS), predict(model))


@pytest.mark.exhaustive
def test_deltas_of_tables_warn_about_other_weights(tmp_path):
    model = model_of(is_large=True)
    fit(model)
    with pytest.warns(UserWarning, match="do not contain .* weights.*closed"):
        _, writer = base_and_writer(model, tmp_path, weights="tables")
    with pytest.warns(UserWarning, match="do not change .* variables of the"):
        path = export(model, writer, tmp_path / "1")
    served = tlm.deltas.ServedModel(path)
    before = served.model.variables_of_model[0].numpy()
    fit(model)
    assert not writer.write().meta.weights
    served.apply(tmp_path / "deltas")
    np.testing.assert_array_equal(
        served.model.variables_of_model[0].numpy(), before
    )
    model.export(tmp_path / "2", verbose=False)
    with pytest.warns(
        UserWarning, match="do not change .* variables of .*_normal"
    ):
        writer.mark_export(tmp_path / "2")
    with pytest.raises(ValueError, match="`weights` must be one of"):
        base_and_writer(model, tmp_path, weights="dense")


def test_a_writer_of_a_layer_warns_about_the_weights_of_the_model(tmp_path):
    model = model_of()
    fit(model)
    base = tf.train.Checkpoint(model=model).save(str(tmp_path / "base"))
    writer = tlm.deltas.DeltaWriter(
        model.get_layer("words"), tmp_path / "deltas", base=base
    )
    with pytest.warns(UserWarning, match="pass the model, not only its tables"):
        export(model, writer, tmp_path / "1")


@pytest.mark.exhaustive
def test_deltas_without_the_weights_of_the_model_raise(tmp_path):
    model = model_of()
    fit(model)
    base, writer = base_and_writer(model, tmp_path)
    served = tlm.deltas.ServedModel(export(model, writer, tmp_path / "1"))
    fit(model)
    writer.write()
    served.apply(tmp_path / "deltas")
    words = model.get_layer("words")
    meta = tmp_path / "deltas" / "00000001" / "meta.json"
    found = chain.meta_from_json(meta.read_text(), str(meta))
    assert found.weights
    # This writer writes only tables.
    other = tlm.deltas.DeltaWriter(words, tmp_path / "others", base=base)
    fit(model)
    with pytest.warns(UserWarning, match="do not change"):
        old = tlm.deltas.ServedModel(export(model, other, tmp_path / "2"))
    other.write()
    old.apply(tmp_path / "others")
    link = {"base": other.deltas[0].meta.base, "writer": "", "sequence": 0}
    for name, value in {**link, "link": ""}.items():
        object.__setattr__(served._state, name, value)
    before = [one.numpy() for one in served.model.variables_of_model]
    with pytest.raises(ValueError, match="must record all weights of the mod"):
        served.apply(tmp_path / "others")
    for one, value in zip(served.model.variables_of_model, before):
        np.testing.assert_array_equal(one.numpy(), value)


def test_a_damaged_weight_raises_and_changes_nothing(tmp_path):
    model = model_of()
    fit(model)
    _, writer = base_and_writer(model, tmp_path)
    served = tlm.deltas.ServedModel(export(model, writer, tmp_path / "1"))
    fit(model)
    delta = writer.write()
    before = served.model.serve(IDS).numpy()
    (data,) = (tmp_path / "deltas" / "00000001").glob("delta.data*")
    content = bytearray(data.read_bytes())
    kernel = np.asarray(model.get_layer("out").kernel).tobytes()
    content[content.index(kernel)] ^= 1
    data.write_bytes(content)
    for one in (delta.path, tmp_path / "deltas"):
        with pytest.raises(ValueError, match="checksum.*file was modified"):
            served.apply(one if one is not delta.path else [one])
    np.testing.assert_array_equal(served.model.serve(IDS), before)
    with pytest.raises(ValueError, match="the file was modified"):
        tlm.deltas.update_export(
            tmp_path / "1", tmp_path / "deltas", tmp_path / "2"
        )


def test_a_model_that_was_trained_before_the_mark_raises(tmp_path):
    model = model_of()
    fit(model)
    _, writer = base_and_writer(model, tmp_path)
    model.export(tmp_path / "1", verbose=False)
    kernel = model.get_layer("out").kernel
    kernel.assign(kernel + 1)
    with pytest.raises(
        ValueError, match="'out/kernel' .* before the next trai"
    ):
        writer.mark_export(tmp_path / "1")


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("atomic", [None, False])
def test_calls_in_a_block_see_all_weights_of_one_delta(atomic, tmp_path):
    model = model_of()
    fit(model)
    _, writer = base_and_writer(model, tmp_path)
    served = tlm.deltas.ServedModel(export(model, writer, tmp_path / "1"))
    known = [predict(model)]
    if atomic is False:
        # Only the dense weights change.
        for layer in model.layers:
            if isinstance(layer, tlm.layers.ShardedEmbedding):
                layer.trainable = False
        model.compile(keras.optimizers.Adam(0.02), "mse")
    is_done, wrong, seen = threading.Event(), [], set()

    def call():
        while not is_done.is_set():
            with served.lookups():
                found = served.model.serve(IDS).numpy()
            at = [
                number
                for number, one in enumerate(known)
                if np.array_equal(one, found)
            ]
            seen.update(at)
            if not at:
                wrong.append(found)

    reader = threading.Thread(target=call)
    for number in range(1, 6):
        fit(model)
        known.append(predict(model))
        writer.write()
        if number == 1:
            reader.start()
        served.apply(tmp_path / "deltas", atomic=atomic)
    is_done.set()
    reader.join()
    assert not wrong
    assert len(seen) > 1


@pytest.mark.exhaustive
def test_a_module_with_several_dtypes(tmp_path):
    class Scorer(tf.Module):
        def __init__(self):
            super().__init__()
            self.embedding = cases.embedding()
            self.scale = tf.Variable(tf.ones([8], tf.bfloat16))
            self.offset = tf.Variable(tf.ones([8], tf.bfloat16))
            self.count = tf.Variable(3, dtype=tf.int64, trainable=False)
            self.name_of_run = tf.Variable("first", trainable=False)

        @tf.function(input_signature=cases.signature())
        def serve(self, inputs):
            found = self.embedding(inputs)["kind"]
            scaled = tf.cast(found, tf.bfloat16) * self.scale + self.offset
            return scaled, self.count, self.name_of_run

    one = Scorer()
    base = tf.train.Checkpoint(one).save(str(tmp_path / "base"))
    writer = tlm.deltas.DeltaWriter(one, tmp_path / "deltas", base=base)
    tf.saved_model.save(one, str(tmp_path / "1"))
    writer.mark_export(tmp_path / "1")
    served = tlm.deltas.ServedModel(tmp_path / "1")
    one.scale.assign(one.scale * 3)
    one.count.assign_add(1)
    one.name_of_run.assign("second")
    cases.train(one.embedding, 1)
    writer.write()
    served.apply(tmp_path / "deltas")
    for found, wanted in zip(
        served.model.serve(cases.inputs()), one.serve(cases.inputs())
    ):
        np.testing.assert_array_equal(found.numpy(), wanted.numpy())
    tlm.deltas.update_export(
        tmp_path / "1", tmp_path / "deltas", tmp_path / "2"
    )
    loaded = tf.saved_model.load(str(tmp_path / "2"))
    assert loaded.name_of_run.numpy() == b"second"
    restored = Scorer()
    tf.train.Checkpoint(restored).read(
        tlm.deltas.apply(base, tmp_path / "deltas")
    ).expect_partial()
    assert int(restored.count) == 4


@pytest.mark.exhaustive
def test_a_model_on_a_mesh(tmp_path):
    mesh = mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh=mesh)
    layout_map[".*kernel"] = layout_of(mesh, None, "model")
    with tlm.layout_map_scope(layout_map):
        ids = keras.Input([2], dtype="int64")
        words = tlm.layers.ShardedEmbedding(
            tlm.vocabulary.OpenVocabulary(80),
            4,
            optimizer="adagrad",
            name="words",
        )
        x = keras.layers.Flatten()(words(ids))
        x = keras.layers.Dense(4, "relu")(x)
        model = keras.Model(ids, keras.layers.Dense(2)(x))
        model.compile("adam", "mse")
    fit(model)
    base, writer = base_and_writer(model, tmp_path)
    served = tlm.deltas.ServedModel(export(model, writer, tmp_path / "1"))
    fit(model)
    writer.write()
    served.apply(tmp_path / "deltas")
    tlm.export(model, tmp_path / "fresh")
    fresh = tf.saved_model.load(str(tmp_path / "fresh"))
    np.testing.assert_array_equal(served.model.serve(IDS), fresh.serve(IDS))
    np.testing.assert_allclose(
        served.model.serve(IDS), model.predict(IDS, verbose=0), atol=1e-6
    )
    wanted = tf.train.Checkpoint(model=model).save(str(tmp_path / "wanted"))
    full = tf.train.load_checkpoint(tlm.deltas.apply(base, tmp_path / "deltas"))
    reader = tf.train.load_checkpoint(wanted)
    for key in reader.get_variable_to_shape_map():
        if key.endswith("VARIABLE_VALUE") and "save_counter" not in key:
            np.testing.assert_array_equal(
                full.get_tensor(key), reader.get_tensor(key), key
            )
