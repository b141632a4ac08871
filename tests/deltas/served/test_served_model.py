"""Tests `ServedModel`: applied deltas are equal to a new export."""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import forked_process
from tests.deltas.served import cases
from tf_layoutmap.deltas import base as base_file
from tf_layoutmap.deltas import delta_files
from tf_layoutmap.deltas.served import chain, export_state
from tf_layoutmap.embedding import changes, tables
from tf_layoutmap.vocabulary import bucket_layout, parts

ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("rows", ["float32", "float16", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("strings", [True, False])
@pytest.mark.parametrize("oov_embedding", ["zeros", "trainable"])
@pytest.mark.parametrize("atomic", [True, False])
def test_applied_deltas_equal_a_new_export(
    rows, dtype, num_shards, fuse, strings, oov_embedding, atomic, tmp_path
):
    one = cases.embedding(
        num_shards=num_shards, oov_embedding=oov_embedding, table_dtypes=dtype
    )
    for step in range(4):
        cases.train(one, step, strings)
    _, deltas = cases.base_and_writer(one, tmp_path)
    arguments = dict(row_format=rows, fuse=fuse, strings=strings)
    path = cases.export(one, tmp_path / "1", delta_writer=deltas, **arguments)
    served = tlm.deltas.ServedModel(path)
    kept = tlm.deltas.ServedModel(path)
    vocabulary = one.vocabularies["words"]
    batch = cases.inputs(strings)
    for number, step in enumerate(range(4, 16, 4), start=1):
        for nested in range(step, step + 4):
            cases.train(one, nested, strings)
        vocabulary.evict(
            tf.strings.as_string(np.arange(0, 400, 7))
            if strings
            else np.arange(0, 400, 7)
        )
        deltas.write()
        fresh = cases.export(one, tmp_path / "fresh", **arguments)
        assert served.apply(tmp_path / "deltas", atomic=atomic) == number
        assert served.sequence == number
        cases.assert_same_tables(
            cases.in_memory(served.model), cases.stored(fresh)
        )
        loaded = tf.saved_model.load(fresh)
        wanted = loaded.serve(batch)
        with served.lookups():
            found = served.model.serve(batch)
        for name, value in wanted.items():
            np.testing.assert_array_equal(found[name], value)
    assert len(np.unique(wanted["word"], axis=0)) > 20
    assert served.apply(tmp_path / "deltas") == 3
    # Another model applies all deltas in one call.
    assert kept.apply([delta.path for delta in deltas.deltas]) == 3
    cases.assert_same_tables(cases.in_memory(kept.model), cases.stored(fresh))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Returns a folder with an export and three deltas, and their embedding.

    The folder `other` contains an export and deltas of another base.
    """
    where = tmp_path_factory.mktemp("written")
    for folder, seed in ((where, 50), (where / "other", 60)):
        one = cases.embedding()
        for step in range(3):
            cases.train(one, seed + step)
        _, deltas = cases.base_and_writer(one, folder)
        cases.export(one, folder / "model", "int8", delta_writer=deltas)
        for step in range(3):
            cases.train(one, step)
            deltas.write()
        cases.export(one, folder / "fresh", "int8")
    return where


@pytest.fixture
def served(written, tmp_path):
    """Copies the model and the deltas, and loads the model."""
    for name in ("model", "deltas"):
        shutil.copytree(written / name, tmp_path / name)
    return tlm.deltas.ServedModel(tmp_path / "model")


def truncate_data(folder):
    (data,) = (folder / "00000002").glob("delta.data*")
    data.write_bytes(data.read_bytes()[:-1])


def modify_data(folder):
    (data,) = (folder / "00000003").glob("delta.data*")
    found = bytearray(data.read_bytes())
    found[len(found) // 2] ^= 1
    data.write_bytes(found)


def modify_meta(folder):
    meta = folder / "00000001" / "meta.json"
    found = json.loads(meta.read_text())
    found["tables"]["words"]["num_rows"] += 1
    meta.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (truncate_data, "00000002/delta.data.*truncated or modified"),
        (modify_data, "00000003/delta.data.*the file was modified"),
        (modify_meta, "00000001/meta.json.*whose seal does not match"),
        (
            lambda folder: shutil.rmtree(folder / "00000002"),
            "consecutive numbers. Received: delta 3 after 1",
        ),
        (
            lambda folder: shutil.rmtree(folder / "00000001"),
            "consecutive numbers. Received: delta 2 after 0",
        ),
        (
            lambda folder: shutil.copytree(
                folder / "00000002", folder / "00000004"
            ),
            "00000004' must hold delta 4. Received: delta 2 again",
        ),
    ],
)
def test_an_invalid_delta_raises_and_changes_nothing(
    change, message, served, tmp_path
):
    before = cases.in_memory(served.model)
    change(tmp_path / "deltas")
    with pytest.raises(ValueError, match=message):
        served.apply(tmp_path / "deltas")
    assert served.sequence == 0
    assert cases.in_memory(served.model) == before


def test_deltas_of_another_base_raise(served, written, tmp_path):
    before = cases.in_memory(served.model)
    with pytest.raises(ValueError, match="Delta 1 must be of base 'of the mod"):
        served.apply(written / "other" / "deltas")
    assert cases.in_memory(served.model) == before
    served.apply(tmp_path / "deltas")
    # All deltas of the foreign directory have numbers that were applied.
    with pytest.raises(ValueError, match="another delta with this number"):
        served.apply(written / "other" / "deltas")


def test_deltas_of_a_restarted_training_raise(tmp_path):
    """The export contains rows of a step that the restarted training lost."""
    one = cases.embedding()
    cases.train(one, 0)
    base, lost = cases.base_and_writer(one, tmp_path)
    cases.train(one, 1)
    cases.export(one, tmp_path / "model", delta_writer=lost)
    again = cases.embedding()
    tf.train.Checkpoint(embedding=again).restore(base)
    deltas = tlm.deltas.DeltaWriter(again, tmp_path / "deltas", base=base)
    cases.export(again, tmp_path / "second", delta_writer=deltas)
    cases.train(again, 2)
    deltas.write()
    served = tlm.deltas.ServedModel(tmp_path / "model")
    with pytest.raises(ValueError, match="training was restarted after the ex"):
        served.apply(tmp_path / "deltas")
    tlm.deltas.prune(tmp_path / "deltas", keep=0)
    with pytest.raises(ValueError, match="training was restarted after the ex"):
        served.apply(tmp_path / "deltas")
    # After the first delta, later writers may continue.
    second = tlm.deltas.ServedModel(tmp_path / "second")
    second.apply(tmp_path / "deltas")
    third = tlm.deltas.DeltaWriter(again, tmp_path / "deltas", base=base)
    cases.train(again, 3)
    third.write()
    assert second.apply(tmp_path / "deltas") == 2
    fresh = cases.export(again, tmp_path / "fresh")
    cases.assert_same_tables(cases.in_memory(second.model), cases.stored(fresh))


def test_a_repeated_delta_raises(served, tmp_path):
    first = tmp_path / "deltas" / "00000001"
    assert served.apply([first]) == 1
    with pytest.raises(ValueError, match="delta 1, which was already applied"):
        served.apply([first])
    with pytest.raises(ValueError, match="consecutive.*delta 3 after 1"):
        served.apply([tmp_path / "deltas" / "00000003"])
    assert served.sequence == 1


def test_a_delta_of_another_history_raises(served, tmp_path):
    """Two trainers continue from the same base and the same first delta."""
    deltas = tmp_path / "deltas"
    served.apply([deltas / "00000001"])
    meta = deltas / "00000002" / "meta.json"
    found = json.loads(meta.read_text())
    found["previous"] = "0" * 64
    del found["seal"], found["format"]
    meta.write_text(chain.Meta(**found).to_json())
    with pytest.raises(ValueError, match="must follow delta 1.*another one"):
        served.apply(deltas)
    assert served.sequence == 1


@pytest.mark.parametrize("applied", [0, 1, 2, 3])
def test_merged_deltas_are_applied(applied, served, written, tmp_path):
    deltas = tmp_path / "deltas"
    for number in range(1, applied + 1):
        served.apply([deltas / f"{number:08d}"])
    tlm.deltas.prune(deltas, keep=1)
    # The model has applied none, some or all of the merged deltas.
    assert served.apply(deltas) == 3
    cases.assert_same_tables(
        cases.in_memory(served.model), cases.stored(written / "fresh")
    )


def test_a_merged_delta_of_another_history_raises(served, written, tmp_path):
    served.apply([tmp_path / "deltas" / "00000001"])
    other = tlm.deltas.prune(tmp_path / "deltas", keep=0)[0]
    meta = dataclasses.replace(
        other.meta, merged=("0" * 64, *other.meta.merged[1:])
    )
    pathlib.Path(other.path, "meta.json").write_text(meta.to_json())
    with pytest.raises(ValueError, match="another delta with this number"):
        served.apply(tmp_path / "deltas")
    with pytest.raises(ValueError, match="must follow delta 1"):
        served.apply([other.path])


def delta_with(folder, change):
    """Changes the tensors of the first delta; checksums remain valid."""
    path = folder / "00000001"
    reader = tf.train.load_checkpoint(str(path / "delta"))
    tensors = {
        key: np.asarray(reader.get_tensor(key))
        for key in reader.get_variable_to_shape_map()
    }
    change(tensors)
    meta = chain.meta_from_json((path / "meta.json").read_text(), "")
    shutil.rmtree(path)
    delta_files.write_files(
        str(path),
        tensors,
        lambda of_files: dataclasses.replace(meta, files=of_files),
    )


def set_value(name, function):
    def change(tensors):
        tensors[name] = function(tensors[name])

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            set_value("kinds/parameters", lambda one: one.astype(np.float64)),
            "'kinds' of the model requires values of dtype float32. "
            "Received: float64 .*00000001",
        ),
        (
            set_value("kinds/parameters", lambda one: one[:, :5]),
            r"requires values of shape \['n', 8\]. Received: shape \[.*, 5\]",
        ),
        (
            set_value("kinds/rows", lambda one: one + 35),
            r"Rows of table 'kinds' must be in \[0, 40\)",
        ),
        (
            set_value("kinds/rows", lambda one: one[:-1]),
            "'parameters' of table 'kinds' must have",
        ),
        (
            lambda tensors: tensors.pop("words/vocabulary_keys"),
            "requires the tensor 'words/vocabulary_keys' of delta",
        ),
        (
            set_value("words/parameters", lambda one: one * np.nan),
            r"'words' of the model is stored as int8, and row \d+ of the "
            "deltas holds nan in column 0, which is not finite",
        ),
    ],
)
def test_a_delta_that_does_not_fit_raises(change, message, served, tmp_path):
    before = cases.in_memory(served.model)
    delta_with(tmp_path / "deltas", change)
    shutil.rmtree(tmp_path / "deltas" / "00000002")
    shutil.rmtree(tmp_path / "deltas" / "00000003")
    with pytest.raises(ValueError, match=message):
        served.apply(tmp_path / "deltas")
    assert cases.in_memory(served.model) == before
    with pytest.raises(ValueError, match=message):
        tlm.deltas.update_export(
            tmp_path / "model", tmp_path / "deltas", tmp_path / "new"
        )
    assert sorted(one.name for one in tmp_path.iterdir()) == ["deltas", "model"]


def test_an_export_without_deltas_raises(written):
    with pytest.raises(ValueError, match="tlm.export.*delta_writer=writer"):
        tlm.deltas.ServedModel(written / "fresh")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:100], "truncated or modified file"),
        (
            lambda text: text.replace('"sequence": 0', '"sequence": 1'),
            "whose seal does not match",
        ),
        (
            lambda text: text.replace('"format": 1', '"format": 2'),
            "of format 1.*Received: format 2",
        ),
    ],
)
def test_a_modified_description_raises(change, message, served, tmp_path):
    file = tmp_path / "model" / export_state.FILE
    file.write_text(change(file.read_text()))
    with pytest.raises(ValueError, match=message):
        tlm.deltas.ServedModel(tmp_path / "model")


def test_the_description_of_another_model_raises(written, tmp_path):
    shutil.copytree(written / "fresh", tmp_path / "model")
    target = tmp_path / "model" / export_state.FILE
    target.parent.mkdir(exist_ok=True)
    shutil.copy(written / "model" / export_state.FILE, target)
    with pytest.raises(ValueError, match="a file of another SavedModel"):
        tlm.deltas.ServedModel(tmp_path / "model")


def test_apply_inside_a_block_of_lookups_raises(served, tmp_path):
    with (
        served.lookups(),
        pytest.raises(RuntimeError, match="inside `with lookups"),
    ):
        served.apply(tmp_path / "deltas", atomic=True)
    assert served.sequence == 0


def test_names_are_the_names_of_deltas():
    assert export_state.PARAMETERS == tables.PARAMETERS
    assert export_state.KEYS == parts.KEYS
    assert export_state.LANES == tuple(changes.LANES)
    assert {*export_state.WHOLE, export_state.SKETCH} == set(changes.WHOLE)
    assert export_state.SKETCH_ROWS == base_file.SKETCH_ROWS
    assert export_state.SKETCH_CELLS == base_file.SKETCH_CELLS
    assert export_state.EMPTY_KEY == bucket_layout.EMPTY_KEY


# Without the package, with a copy of the folder under another name.
PROGRAM = """
import sys
sys.modules["tf_layoutmap"] = None
import numpy as np
import tensorflow as tf
import copied_deltas
served = copied_deltas.ServedModel(sys.argv[1])
assert served.apply(sys.argv[2]) == 3
np.savez(
    sys.argv[3],
    **{f"tables{i}": one.numpy() for i, one in enumerate(served.model.tables)},
    **{f"keys{i}": one.numpy() for i, one in enumerate(served.model.keys)},
)
copied_deltas.update_export(sys.argv[1], sys.argv[2], sys.argv[4])
# The names of files only, because any folder can be called tf_layoutmap.
loaded = {line.split("/")[-1].strip() for line in open("/proc/self/maps")}
assert not [name for name in loaded if "layoutmap" in name], loaded
assert not [name for name in sys.modules if name.startswith("tf_layoutmap.")]
"""


def test_a_process_without_this_package_applies_deltas(written, tmp_path):
    shutil.copytree(
        ROOT / "tf_layoutmap" / "deltas" / "served", tmp_path / "copied_deltas"
    )
    forked_process.run_code(
        PROGRAM,
        str(written / "model"),
        str(written / "deltas"),
        str(tmp_path / "found.npz"),
        str(tmp_path / "new"),
        env={"PYTHONPATH": str(tmp_path)},
    )
    fresh = tf.saved_model.load(str(written / "fresh"))
    found = np.load(tmp_path / "found.npz")
    assert set(found) == {"tables0", "tables1", "keys0"}
    for name in ("tables", "keys"):
        for number, one in enumerate(getattr(fresh, name)):
            np.testing.assert_array_equal(found[f"{name}{number}"], one)
    assert cases.stored(tmp_path / "new") == cases.stored(written / "fresh")


def test_an_installed_package_loads_no_native_code(written):
    forked_process.run_code(
        "import sys\n"
        "from tf_layoutmap.deltas import served\n"
        "served.ServedModel(sys.argv[1]).apply(sys.argv[2])\n"
        "for line in open('/proc/self/maps'):\n"
        "    name = line.split('/')[-1]\n"
        "    assert not name.startswith(('_layoutmap', '_native')), line\n",
        str(written / "model"),
        str(written / "deltas"),
        env={"PYTHONPATH": str(ROOT)},
    )
