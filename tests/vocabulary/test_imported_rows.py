"""Rows are exported to files, and imported into other tables."""

import json
import os
import pathlib
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.files.full_disk import full_disk
from tests.vocabulary.test_key_rows import contents, make, train
from tf_layoutmap.vocabulary import row_files

tpu = tf.tpu.experimental.embedding
FORMATS = ["numpy", "parquet"]


def trained(num_keys=200, *, keys_per_step=40, **arguments):
    one, _ = make(300, num_shards=3, **arguments)
    rng = np.random.default_rng(0)
    for _ in range(num_keys // keys_per_step):
        train(one, rng.integers(0, 10**9, keys_per_step))
    return one


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_imported_table_equals_the_exported_table(tmp_path, format, dtype):
    one = trained(table_dtypes=dtype)
    vocabulary = one.vocabularies["words"]
    # A later step uses no key, so no last step equals the current step.
    train(one, [1])
    vocabulary.evict([1])
    expected = contents(vocabulary)
    path = tmp_path / "words"
    assert vocabulary.export(path, format=format, block_size=64) == len(
        expected
    )
    for capacity, num_shards in ((300, 3), (1000, 2)):
        other, _ = make(capacity, num_shards=num_shards, table_dtypes=dtype)
        into = other.vocabularies["words"]
        written = tlm.vocabulary.import_rows(path, into)
        assert written.num_new == written.num_written == len(expected)
        assert not len(written.without_row)
        assert contents(into) == expected
        assert into.stats()["step"] == vocabulary.stats()["step"] == 6
        # A second import changes nothing.
        assert tlm.vocabulary.import_rows(os.fspath(path), into).num_new == 0
        assert contents(into) == expected


@pytest.mark.parametrize("format", FORMATS)
def test_files_on_other_file_systems_are_supported(format):
    one = trained()
    vocabulary = one.vocabularies["words"]
    path = f"ram://exported_rows/{format}"
    for block_size in (64, 50):
        vocabulary.export(path, format=format, block_size=block_size)
        other, _ = make(300)
        tlm.vocabulary.import_rows(path, other.vocabularies["words"])
        assert contents(other.vocabularies["words"]) == contents(vocabulary)
    # The files of the first export were removed.
    with tf.io.gfile.GFile(f"{path}/_meta.json") as file:
        names = [one["name"] for one in json.load(file)["files"]]
    assert sorted(tf.io.gfile.listdir(path)) == ["_meta.json", *names]
    for name in ("notes", "keys-2024.csv", "keys-00001.csv", "_meta.txt"):
        folder = f"ram://other_files/{format}-{name}"
        with tf.io.gfile.GFile(f"{folder}/{name}", "w") as file:
            file.write("text")
        with pytest.raises(
            OSError, match="does not contain '_meta.json'.*other_f"
        ):
            vocabulary.export(folder, format=format)
        # Files of the user remain in a folder with exported rows.
        tf.io.gfile.copy(f"{path}/_meta.json", f"{folder}/_meta.json")
        vocabulary.export(folder, format=format)
        assert tf.io.gfile.exists(f"{folder}/{name}")


def test_word_vectors_on_other_file_systems_are_supported():
    with tf.io.gfile.GFile("ram://vectors.txt", "w") as file:
        file.write("a 1 2 3\nb 4 5 6\n")
    one, _ = make(300)
    tlm.vocabulary.import_rows(
        "ram://vectors.txt", one.vocabularies["words"], format="text"
    )
    (table,) = one.embedding_tables.values()
    rows = one.vocabularies["words"].lookup(["b", "a"])
    assert tf.gather(table, rows).numpy().tolist() == [[4, 5, 6], [1, 2, 3]]


def test_keys_that_do_not_fit_are_reported():
    one = trained()
    expected = contents(one.vocabularies["words"])
    small, _ = make(40)
    written = tlm.vocabulary.import_rows(
        one.vocabularies["words"], small.vocabularies["words"]
    )
    found = contents(small.vocabularies["words"])
    assert len(found) == written.num_written
    assert set(found) | set(written.without_row.tolist()) == set(expected)
    assert len(found) + len(written.without_row) == len(expected)
    assert all(expected[key] == value for key, value in found.items())


def test_the_ages_of_keys_are_kept_in_a_vocabulary_with_keys():
    one, _ = make()
    for keys in ([1, 2], [2], [3], [4]):
        train(one, keys)
    other, _ = make()
    for _ in range(3):
        train(other, [9])
    tlm.vocabulary.import_rows(
        one.vocabularies["words"], other.vocabularies["words"]
    )
    # The steps are 4 and 3. The last step of key 1 was 3 steps ago.
    assert {
        key: last_step
        for key, (*_, last_step) in contents(
            other.vocabularies["words"]
        ).items()
    } == {1: 0, 2: 1, 3: 2, 4: 3, 9: 3}
    assert other.vocabularies["words"].stats()["step"] == 3


def test_numpy_files_can_be_read_without_the_package(tmp_path):
    one = trained()
    vocabulary = one.vocabularies["words"]
    vocabulary.export(tmp_path / "words", block_size=128)
    with open(tmp_path / "words" / "_meta.json") as file:
        meta = json.load(file)
    assert (meta["table"], meta["dim"]) == ("words", 3)
    assert meta["slots"] == {"accumulators": 3}
    assert len(meta["files"]) > 1
    rows = {}
    for one_file in meta["files"]:
        with np.load(tmp_path / "words" / one_file["name"]) as arrays:
            assert set(arrays.files) == {
                "keys",
                "rows",
                "counts",
                "last_steps",
                "slot/accumulators",
            }
            rows.update(zip(arrays["keys"].tolist(), arrays["rows"].tolist()))
    assert rows == {key: row for key, (row, *_) in contents(vocabulary).items()}


def test_parquet_folders_can_be_read_as_a_dataset(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    one = trained()
    vocabulary = one.vocabularies["words"]
    vocabulary.export(tmp_path / "words", format="parquet", block_size=128)
    table = parquet.read_table(tmp_path / "words")
    assert set(table.column_names) == {
        "key",
        "row",
        "count",
        "last_step",
        "slot/accumulators",
    }
    assert dict(zip(table["key"].to_pylist(), table["row"].to_pylist())) == {
        key: row for key, (row, *_) in contents(vocabulary).items()
    }


def test_a_missing_pyarrow_is_named(tmp_path, monkeypatch):
    one = trained(40)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match="require pyarrow.*pip install pya"):
        one.vocabularies["words"].export(tmp_path / "words", format="parquet")
    assert not os.listdir(tmp_path)


def test_an_export_replaces_only_an_earlier_export(tmp_path):
    one = trained(40)
    vocabulary = one.vocabularies["words"]
    path = tmp_path / "words"
    vocabulary.export(path)
    train(one, [5])
    assert vocabulary.export(path) == vocabulary.stats()["num_keys"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious").write_text("data")
    with pytest.raises(OSError, match="the path exists, and does not contain"):
        vocabulary.export(other)
    assert os.listdir(other) == ["precious"]
    assert sorted(os.listdir(tmp_path)) == ["other", "words"]


def test_an_export_to_a_full_disk_keeps_the_earlier_export(tmp_path):
    one = trained(40)
    vocabulary = one.vocabularies["words"]
    path = tmp_path / "words"
    vocabulary.export(path)
    before = contents(vocabulary)
    vocabulary.write(np.arange(100), np.ones([100, 3]))
    with full_disk(), pytest.raises(OSError):
        vocabulary.export(path)
    assert os.listdir(tmp_path) == ["words"]
    other, _ = make(300)
    tlm.vocabulary.import_rows(path, other.vocabularies["words"])
    assert contents(other.vocabularies["words"]) == before


def damage(path, how):
    names = [name for name in os.listdir(path) if name.startswith("keys-")]
    file = pathlib.Path(path, sorted(names)[-1])
    if how == "missing":
        file.unlink()
    elif how == "truncated":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif how == "modified":
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif how == "pickled":
        np.savez(file, keys=np.array([{}]))
    else:
        file.write_bytes(pathlib.Path(path, sorted(names)[0]).read_bytes())


@pytest.mark.parametrize(
    "how", ["missing", "truncated", "modified", "pickled", "copied"]
)
def test_damaged_files_are_named(tmp_path, how):
    one = trained()
    path = tmp_path / "words"
    one.vocabularies["words"].export(path, block_size=64)
    damage(path, how)
    other, _ = make(300)
    with pytest.raises(ValueError, match="keys-0000.*missing, truncated or"):
        tlm.vocabulary.import_rows(path, other.vocabularies["words"])


def test_invalid_imports_raise(tmp_path):
    one = trained(40)
    vocabulary = one.vocabularies["words"]
    vocabulary.export(tmp_path / "words")
    with pytest.raises(ValueError, match="a folder that `Vocabulary.export`"):
        tlm.vocabulary.import_rows(tmp_path, vocabulary)
    with pytest.raises(TypeError, match="`vocabulary` must be a vocabulary"):
        tlm.vocabulary.import_rows(tmp_path / "words", one)
    with pytest.raises(TypeError, match="a path, a vocabulary, rows or an"):
        tlm.vocabulary.import_rows(5, vocabulary)
    with pytest.raises(
        TypeError, match="an iterable of tlm.vocabulary.KeyBlock"
    ):
        tlm.vocabulary.import_rows([5], vocabulary)
    sgd, _ = make(300, tpu.SGD(0.1))
    with pytest.raises(ValueError, match="`slots` must be False if"):
        tlm.vocabulary.import_rows(
            tmp_path / "words", sgd.vocabularies["words"]
        )
    tlm.vocabulary.import_rows(
        tmp_path / "words", sgd.vocabularies["words"], slots=False
    )
    assert len(contents(sgd.vocabularies["words"])) == len(contents(vocabulary))
    wide, _ = make(300, dim=4)
    with pytest.raises(ValueError, match=r"`rows` must be of shape \(\d+, 4\)"):
        tlm.vocabulary.import_rows(
            tmp_path / "words", wide.vocabularies["words"]
        )
    meta = tmp_path / "words" / "_meta.json"
    text = meta.read_text()
    for old, new in (
        ('"format": "numpy"', '"format": "csv"'),
        ("keys-00000.npz", "../keys-00000.npz"),
        ('"integers"', '"floats"'),
        ('"num_keys"', '"keys"'),
        ('"slots": {', '"columns": {'),
        ('"files": [', '"files": [1, '),
    ):
        assert old in text
        meta.write_text(text.replace(old, new))
        with pytest.raises(ValueError, match="_meta.json'.*not valid"):
            tlm.vocabulary.import_rows(tmp_path / "words", vocabulary)
    meta.write_text(text)
    meta.write_text(meta.read_text().replace('"version": 1', '"version": 9'))
    with pytest.raises(ValueError, match="must have the version 1. Received"):
        tlm.vocabulary.import_rows(tmp_path / "words", vocabulary)


@pytest.mark.parametrize("format", FORMATS)
def test_string_keys_remain_strings(tmp_path, format):
    one, _ = make()
    one.vocabularies["words"].write(["a", "b"], np.ones([2, 3]))
    one.vocabularies["words"].export(tmp_path / "words", format=format)
    other, _ = make()
    tlm.vocabulary.import_rows(tmp_path / "words", other.vocabularies["words"])
    assert other.vocabularies["words"].contains(["a", "b"]).numpy().all()
    assert other.vocabularies["words"].stats()["key_type"] == "strings"
    integers, _ = make()
    integers.vocabularies["words"].write([1])
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be integer"):
        tlm.vocabulary.import_rows(
            tmp_path / "words", integers.vocabularies["words"]
        )


def test_blocks_of_the_program_are_imported():
    one, _ = make()
    blocks = (
        tlm.vocabulary.KeyBlock(
            np.array([n, n + 10]), np.full([2, 3], float(n))
        )
        for n in range(3)
    )
    written = tlm.vocabulary.import_rows(blocks, one.vocabularies["words"])
    assert written.num_written == 6
    assert contents(one.vocabularies["words"])[12] == (
        [2.0] * 3,
        [[0.5] * 3],
        1,
        0,
    )


def test_an_empty_vocabulary_is_exported(tmp_path):
    one, _ = make()
    assert one.vocabularies["words"].export(tmp_path / "words") == 0
    assert os.listdir(tmp_path / "words") == [row_files.META_FILE]
    other, _ = make()
    written = tlm.vocabulary.import_rows(
        tmp_path / "words", other.vocabularies["words"]
    )
    assert (written.num_written, written.without_row.tolist()) == (0, [])


def test_rows_of_a_layer_are_exported_and_imported(tmp_path):
    def layer():
        found = tlm.layers.ShardedEmbedding(
            tlm.vocabulary.OpenVocabulary(50),
            4,
            optimizer="adagrad",
            name="users",
        )
        found(tf.constant([["x"]]))
        return found

    one = layer()
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    one.vocabulary.write(["ann", "bob"], rows)
    one.vocabulary.export(tmp_path / "users")
    other = layer()
    tlm.vocabulary.import_rows(tmp_path / "users", other.vocabulary)
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(other(tf.constant([["ann", "bob"]])))[0],
        rows,
    )


def test_a_vocabulary_starts_from_a_trained_closed_table():
    config = tpu.TableConfig(20, 3, combiner="sum", name="kinds")
    closed = tlm.TPUEmbedding(
        {"kind": tpu.FeatureConfig(config)},
        tpu.Adagrad(0.1),
        partitioner=tlm.partitioners.FixedShardsPartitioner(3),
    )
    closed.enqueue({"kind": tf.constant([3, 19])})
    closed.dequeue()
    closed.apply_gradients({"kind": tf.ones([2, 3])})
    rows = closed.embedding_tables[config]
    slots = closed.slot_variables[config]
    one, _ = make()
    vocabulary = one.vocabularies["words"]
    assert (
        tlm.vocabulary.import_rows(rows, vocabulary, slots=slots).num_new == 20
    )
    expected = tf.convert_to_tensor(rows).numpy()
    np.testing.assert_array_equal(one({"ids": np.arange(20)})["ids"], expected)
    assert contents(vocabulary)[3][1] == [
        tf.convert_to_tensor(slots["accumulators"])[3].numpy().tolist()
    ]


def as_bfloat16(rows):
    return tf.Variable(tf.cast(rows, tf.bfloat16))


@pytest.mark.parametrize(
    "as_rows", [np.asarray, tf.constant, tf.Variable, as_bfloat16]
)
def test_a_vocabulary_starts_from_pretrained_vectors(as_rows, monkeypatch):
    monkeypatch.setattr("tf_layoutmap.vocabulary.key_rows.BLOCK_SIZE", 4)
    one, _ = make()
    vocabulary = one.vocabularies["words"]
    names = [f"word {i}" for i in range(10)]
    vectors = np.arange(30.0).reshape(10, 3)
    written = tlm.vocabulary.import_rows(
        as_rows(vectors), vocabulary, keys=names
    )
    assert written.num_new == 10
    np.testing.assert_array_equal(
        one({"ids": tf.constant(names)})["ids"], vectors
    )


def test_arguments_without_effect_raise(tmp_path):
    one = trained(40)
    vocabulary = one.vocabularies["words"]
    vocabulary.export(tmp_path / "words")
    rows = np.zeros([2, 3])
    for source, arguments, message in (
        (tmp_path / "words", {"keys": [1]}, "`keys` must be omitted unless"),
        (tmp_path / "words", {"name": "a"}, "`name` must be omitted unless"),
        (rows, {"format": "tfra"}, "`format` must be omitted unless"),
        (vocabulary, {"slots": {"a": rows}}, "`slots` must be omitted unless"),
        (rows, {"keys": [1]}, "`keys` must be of length 2, as `source`"),
        (rows, {"slots": {"accumulators": rows[:1]}}, "of length 2"),
        (rows, {"slots": {"momenta": rows}}, "names from \\['accumulators"),
    ):
        with pytest.raises(ValueError, match=message):
            tlm.vocabulary.import_rows(source, vocabulary, **arguments)
    with pytest.raises(ValueError, match="`format` must be one of"):
        tlm.vocabulary.import_rows(tmp_path / "words", vocabulary, format="csv")
    with pytest.raises(TypeError, match="`slots` must be None, False or a"):
        tlm.vocabulary.import_rows(tmp_path / "words", vocabulary, slots=True)
