"""Path arguments accept every file system of TensorFlow, here `ram://`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.deltas.served import cases, test_mark_export
from tests.planning.test_plan import tables_plan
from tf_layoutmap._core import files
from tf_layoutmap.deltas.served import on_disk, storage
from tf_layoutmap.planning import costs as machine_costs
from tf_layoutmap.ps import checkpoints
from tf_layoutmap.vocabulary import foreign_rows

tpu = tf.tpu.experimental.embedding


@pytest.fixture
def folder(tmp_path):
    """Returns a new folder."""
    found = f"ram://remote_paths/{tmp_path.name}"
    tf.io.gfile.makedirs(found)
    return found


def test_exports_and_deltas_work_as_on_a_local_file_system(folder, tmp_path):
    start = cases.save(cases.embedding(), tmp_path / "start")
    results = []
    for where in (str(tmp_path), f"file://{tmp_path}/file", folder):
        one = cases.embedding()
        tf.train.Checkpoint(embedding=one).restore(start).expect_partial()
        base = cases.save(one, f"{where}/base")
        writer = tlm.deltas.DeltaWriter(one, f"{where}/deltas", base=base)
        model = cases.export(one, f"{where}/model", "int8", delta_writer=writer)
        exported = cases.stored(model)
        for step in range(1, 4):
            cases.train(one, step)
            writer.write()
        assert [one.path for one in writer.deltas] == [
            storage.local_path(f"{where}/deltas/0000000{number}")
            for number in (1, 2, 3)
        ]
        served = tlm.deltas.ServedModel(model)
        assert served.apply(f"{where}/deltas") == 3
        merged = tlm.deltas.merge(
            [one.path for one in writer.deltas[:2]], f"{where}/merged"
        )
        assert (merged.meta.first, merged.meta.sequence) == (1, 2)
        assert (
            tlm.deltas.update_export(model, f"{where}/deltas", f"{where}/2")
            == 3
        )
        cases.assert_same_tables(
            cases.in_memory(served.model), cases.stored(f"{where}/2")
        )
        tf.saved_model.load(f"{where}/2")
        with pytest.raises(FileExistsError, match="Argument `target`.*/2'"):
            tlm.deltas.update_export(model, f"{where}/deltas", f"{where}/2")
        assert len(tlm.deltas.prune(f"{where}/deltas", keep=1)) == 2
        full = tlm.deltas.apply(base, f"{where}/deltas", f"{where}/full")
        assert full == f"{where}/full"
        again = tlm.deltas.DeltaWriter(one, f"{where}/deltas", base=base)
        assert [one.meta.sequence for one in again.deltas] == [2, 3]
        results.append(
            (
                exported,
                [one.meta.files for one in again.deltas],
                cases.stored(f"{where}/2"),
            )
        )
        # Without deltas, an export replaces the export.
        cases.export(one, model)
        with pytest.raises(ValueError, match="written with"):
            tlm.deltas.ServedModel(model)
        other = cases.embedding()
        tf.train.Checkpoint(embedding=other).restore(full).expect_partial()
        for table, by_name in one._variables.items():
            for name, variable in by_name.items():
                np.testing.assert_array_equal(
                    other._variables[table][name], variable
                )
        with pytest.raises(ValueError, match="Argument `path` must be a fol"):
            cases.export(one, f"{where}/deltas")
    assert results[0] == results[1] == results[2]


def test_errors_name_the_argument_and_the_path(folder):
    one = cases.embedding()
    base = cases.save(one, f"{folder}/base")
    missing = f"{folder}/missing"
    for call, words in (
        (
            lambda: tlm.deltas.ServedModel(missing),
            "must be a SavedModel.*written",
        ),
        (lambda: tlm.deltas.apply(base, missing), "Argument `directory`"),
        (lambda: tlm.deltas.DeltaWriter(one, folder, base=missing), "`base`"),
        (lambda: tlm.deltas.merge([missing], f"{folder}/m"), "meta.json"),
        (lambda: tlm.deltas.prune(missing, keep=1), "Argument `directory`"),
    ):
        with pytest.raises(ValueError, match=f"(?s){words}") as caught:
            call()
        assert missing in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        tlm.deltas.ServedModel,
        lambda path: tlm.vocabulary.convert(
            path,
            "ram://remote_paths/x",
            {"words": tlm.vocabulary.OpenVocabulary(9)},
        ),
        lambda path: next(foreign_rows.read_tfra(path, 4, "words")),
        lambda path: tlm.deltas.apply(path, "ram://remote_paths"),
    ],
)
def test_an_unknown_scheme_raises_a_value_error(call):
    with pytest.raises(ValueError, match="must .*nowhere://a/b"):
        call("nowhere://a/b")


@pytest.mark.parametrize("is_local", [True, False])
def test_an_update_of_a_replaced_saved_model_raises(
    folder, tmp_path, monkeypatch, is_local
):
    one = cases.embedding()
    base = cases.save(one, f"{folder}/base")
    writer = tlm.deltas.DeltaWriter(one, f"{folder}/deltas", base=base)
    model = cases.export(one, f"{folder}/model", delta_writer=writer)
    cases.train(one, 0)
    writer.write()
    copy = on_disk._copy_without_variables

    def replace(path, new):
        copy(path, new)
        monkeypatch.setattr(on_disk, "_copy_without_variables", copy)
        cases.train(one, 1)
        cases.export(one, model, delta_writer=writer)

    monkeypatch.setattr(on_disk, "_copy_without_variables", replace)
    target = f"{tmp_path if is_local else folder}/2"
    with pytest.raises(RuntimeError, match="model' was replaced while"):
        tlm.deltas.update_export(model, f"{folder}/deltas", target)
    assert not storage.is_file(f"{target}/saved_model.pb")
    assert tlm.deltas.update_export(model, f"{folder}/deltas", target) == 1
    tf.saved_model.load(target)


def test_a_marked_saved_model_accepts_deltas(folder):
    one = cases.embedding()
    base = cases.save(one, f"{folder}/base")
    writer = tlm.deltas.DeltaWriter(one, f"{folder}/deltas", base=base)
    tf.saved_model.save(test_mark_export.Served(one), f"{folder}/model")
    writer.mark_export(f"{folder}/model")
    cases.train(one, 0)
    writer.write()
    assert (
        tlm.deltas.ServedModel(f"{folder}/model").apply(f"{folder}/deltas") == 1
    )


def test_reports_are_written(folder):
    words = tpu.TableConfig(100, 4, name="words")
    features = {"word": tpu.FeatureConfig(words)}
    ids = tf.data.Dataset.from_tensors({"word": tf.constant([1, 2])})
    report = tlm.inspect_ids(ids, features)
    report.save_html(f"{folder}/ids.html")
    assert storage.read_text(f"{folder}/ids.html") == report.html()
    plan = tables_plan()
    plan.save_html(f"{folder}/plan.html")
    assert storage.read_text(f"{folder}/plan.html") == plan.html()
    costs = tlm.planning.MachineCosts.typical()
    path = f"{folder}/costs.json"
    for key in ("a", "b"):
        files.write_text(path, machine_costs.cache_text(path, key, costs))
    for key in ("a", "b"):
        assert machine_costs.read_cache(path, key) == costs
    assert machine_costs.read_cache(path, "c") is None


def write(prefix):
    value = tf.Variable([1.0])
    tf.train.Checkpoint(value=value).write(prefix)


def test_checkpoints_of_a_run_are_complete_with_their_last_file(folder):
    opened = checkpoints.CheckpointFolder(folder, 2)
    for number in (1, 2, 2, 3):
        opened.save(number, write)
    names = [one for one in tf.io.gfile.listdir(folder) if one[0] == "c"]
    assert len(names) == 2
    newest = opened.newest()
    assert newest.num_done == 3
    assert tf.train.Checkpoint(value=tf.Variable([0.0])).read(newest.prefix)
    # Without the file that is written last, a checkpoint is not complete.
    storage.remove(newest.prefix.replace("variables", "run.json"))
    assert opened.newest().num_done == 2
    del opened
    opened = checkpoints.CheckpointFolder(folder, 2)
    assert not storage.is_file(f"{newest.prefix}.index")

    def fail(prefix):
        write(prefix)
        raise tf.errors.ResourceExhaustedError(None, None, "disk full")

    with pytest.raises(OSError, match="disk full"):
        opened.save(4, fail)
    assert opened.newest().num_done == 2


def test_the_program_that_was_started_last_owns_a_folder(folder):
    first = checkpoints.CheckpointFolder(folder, 2)
    first.save(1, write)
    # Another process does not share the claim of this process.
    checkpoints.folder_locks._locks.clear()
    second = checkpoints.CheckpointFolder(folder, 2)
    assert second.newest().num_done == 1
    with pytest.raises(OSError, match="process .* on host .*started last") as e:
        first.save(2, write)
    assert e.value.filename == folder
    second.save(3, write)
    # A program that is started again in the first process owns the folder.
    checkpoints.folder_locks._locks[folder] = first._lock
    third = checkpoints.CheckpointFolder(folder, 2)
    with pytest.raises(OSError, match="started last"):
        second.save(4, write)
    third.save(4, write)
    checkpoints.folder_locks._locks.clear()
    second = checkpoints.CheckpointFolder(folder, 2)

    # The claim is also checked when all variables are written.
    def lose(prefix):
        write(prefix)
        checkpoints.folder_locks.FolderClaim(folder)

    with pytest.raises(OSError, match="started last"):
        second.save(5, lose)
    assert second.newest().num_done == 4


def test_weights_of_keras_are_written_to_any_file_system(folder):
    def make():
        model = keras.Sequential(
            [
                keras.Input([2], dtype="int32"),
                tlm.layers.ShardedEmbedding(9, 4, optimizer="adagrad"),
            ]
        )
        model.compile("sgd", "mse")
        return model

    model, other = make(), make()
    model.fit(np.array([[1, 2]]), np.ones([1, 2, 4]), verbose=0)
    model.save_weights(f"{folder}/a.weights.h5")
    other.load_weights(f"{folder}/a.weights.h5")
    model.save(f"{folder}/a.keras")
    loaded = keras.saving.load_model(f"{folder}/a.keras")
    for one in (other, loaded):
        for found, expected in zip(one.weights, model.weights):
            np.testing.assert_array_equal(found, expected)


def test_a_vocabulary_is_converted_and_evicted_keys_are_written(folder):
    words = tpu.TableConfig(40, 4, initializer=tf.ones, name="words")

    def make(capacity):
        one = tlm.TPUEmbedding(
            {"word": tpu.FeatureConfig(words)},
            tpu.Adagrad(0.5),
            vocabularies={
                "words": tlm.vocabulary.OpenVocabulary(
                    capacity, on_evict=f"{folder}/evicted"
                )
            },
        )
        one.build()
        return one

    one = make(40)
    one.enqueue({"word": tf.range(20, dtype=tf.int64)})
    one.dequeue()
    one.apply_gradients({"word": tf.ones([20, 4])})
    one.vocabularies["words"].evict([3])
    (name,) = [
        one for one in tf.io.gfile.listdir(folder) if one.startswith("evicted")
    ]
    (record,) = tf.data.TFRecordDataset(f"{folder}/{name}")
    example = tf.train.Example.FromString(record.numpy())
    assert example.features.feature["keys"].int64_list.value == [3]
    base = cases.save(one, f"{folder}/base")
    del example
    tlm.vocabulary.convert(
        base,
        f"{folder}/converted",
        {"words": tlm.vocabulary.OpenVocabulary(80)},
    )
    reader = storage.open_checkpoint(f"{folder}/converted")
    shapes = reader.get_variable_to_shape_map()
    assert (
        shapes[
            "embedding/_variables/words/parameters/.ATTRIBUTES/VARIABLE_VALUE"
        ][0]
        > 80
    )
