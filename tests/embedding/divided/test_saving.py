"""Divided tables in a checkpoint, a part of them in memory at a time."""

import json

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import divided_tables
from tests.files import snapshots
from tf_layoutmap import partition
from tf_layoutmap._patches import engine, runtime_rows
from tf_layoutmap.embedding.divided import tables

SHAPE = (11, 3)


@pytest.fixture(autouse=True)
def installed():
    engine.install(runtime_rows.SHARDED_TABLES_GROUP)
    yield
    engine.uninstall(runtime_rows.SHARDED_TABLES_GROUP)


class Told:
    """A table of the first process of three, which counts what it brings."""

    def __init__(self, dtype="float32", seed=0, rows_at_once=2):
        self.values = tf.cast(
            np.random.default_rng(seed).normal(size=SHAPE), dtype
        )
        self.num_brought = 0
        cut = partition.RowPartition.div(SHAPE[0], 3)
        self.table = tables.DividedTable(
            "words",
            tf.Variable(self.values[: cut.sizes[0]]),
            cut,
            0,
            lambda table: self._gather(cut, rows_at_once),
        )

    def _gather(self, cut, rows_at_once):
        for begin in range(0, max(cut.sizes), rows_at_once):
            for shard, size in enumerate(cut.sizes):
                first = cut.offsets[shard] + begin
                last = min(first + rows_at_once, cut.offsets[shard] + size)
                if last > first:
                    self.num_brought += last - first
                    yield first, self.values[first:last]


def key_of(name):
    return f"{name}/.ATTRIBUTES/VARIABLE_VALUE"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("part_bytes", [1, 30, 1 << 20])
def test_a_table_is_one_tensor_however_it_was_written(
    tmp_path, monkeypatch, dtype, part_bytes
):
    monkeypatch.setattr(tables, "PART_BYTES", part_bytes)
    one, two = Told(dtype), Told(dtype, seed=1, rows_at_once=5)
    path = tf.train.Checkpoint(
        one=one.table, two=two.table, other=tf.Variable(7.0)
    ).write(str(tmp_path / "saved"))
    reader = tf.train.load_checkpoint(path)
    for name, told in [("one", one), ("two", two)]:
        np.testing.assert_array_equal(
            reader.get_tensor(key_of(name)), told.values.numpy()
        )
    assert reader.get_tensor(key_of("other")) == 7
    assert not list(tmp_path.glob("*being-written*"))


def test_checkpoints_have_their_number_and_restore_own_rows(tmp_path):
    told = Told()
    checkpoint = tf.train.Checkpoint(table=told.table)
    path = checkpoint.save(str(tmp_path / "saved"))
    assert path == str(tmp_path / "saved-1")
    assert tf.train.latest_checkpoint(str(tmp_path)) == path
    told.table.block.assign(tf.zeros_like(told.table.block))
    checkpoint.restore(path).assert_consumed()
    np.testing.assert_array_equal(
        told.table.block.numpy(), told.values[: len(told.table.rows)]
    )


def test_no_more_than_a_part_is_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "PART_BYTES", 64)
    sizes = []
    write = tf.raw_ops.SaveV2

    def told(*, tensors, **arguments):
        sizes.append(sum(one.dtype.size * int(tf.size(one)) for one in tensors))
        return write(tensors=tensors, **arguments)

    monkeypatch.setattr(tf.raw_ops, "SaveV2", told)
    tf.train.Checkpoint(table=Told().table).write(str(tmp_path / "saved"))
    assert sum(sizes) == 4 * 11 * 3
    # One block more than a part: it is what fills it.
    assert max(sizes) < 64 + 4 * 2 * 3


def test_a_large_checkpoint_has_larger_files_not_more(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "PART_BYTES", 1)
    monkeypatch.setattr(tables, "_MOST_PARTS", 2)
    count = 0
    write = tf.raw_ops.SaveV2

    def counted(**arguments):
        nonlocal count
        count += 1
        return write(**arguments)

    monkeypatch.setattr(tf.raw_ops, "SaveV2", counted)
    tf.train.Checkpoint(table=Told().table).write(str(tmp_path / "saved"))
    assert count == 2


@pytest.mark.slow  # Two processes with tables of 410 MB.
def test_a_save_leaves_the_process_as_large_as_it_was():
    found = json.loads(divided_tables.run_group("exact", 2, 1))
    # It was 308 MB, which stayed; half a table and its slots are 205 MB.
    assert found["MB more while it saves"] < 150, found


def test_an_error_leaves_the_file_before_and_brings_all_rows(
    tmp_path, monkeypatch
):
    path = str(tmp_path / "saved")
    before = Told()
    tf.train.Checkpoint(table=before.table).write(path)
    monkeypatch.setattr(tables, "PART_BYTES", 30)

    def full(**arguments):
        raise tf.errors.ResourceExhaustedError(None, None, "disk full")

    monkeypatch.setattr(tf.raw_ops, "SaveV2", full)
    told = Told(seed=1)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="disk full"):
        tf.train.Checkpoint(table=told.table).write(path)
    # The other processes take part in bringing them.
    assert told.num_brought == 11
    np.testing.assert_array_equal(
        tf.train.load_checkpoint(path).get_tensor(key_of("table")),
        before.values.numpy(),
    )
    assert not list(tmp_path.glob("*being-written*"))


@pytest.mark.parametrize("part_bytes", [1 << 20, 200, 30])
def test_one_checkpoint_is_complete_wherever_a_process_is_killed(
    tmp_path, monkeypatch, part_bytes
):
    """Two, three and many files replace as many."""
    monkeypatch.setattr(tables, "PART_BYTES", part_bytes)
    told = [Told(seed=0), Told(seed=1)]
    path = tmp_path / "all" / "saved"
    tf.train.Checkpoint(table=told[0].table, other=tf.Variable(0.0)).write(path)
    taken = snapshots.Snapshots(path.parent, tmp_path / "copies")
    with taken.of_operations(monkeypatch):
        tf.train.Checkpoint(table=told[1].table, other=tf.Variable(1.0)).write(
            path
        )

    def number_of(prefix):
        reader = tf.train.load_checkpoint(str(prefix))
        number = int(reader.get_tensor(key_of("other")))
        np.testing.assert_array_equal(
            reader.get_tensor(key_of("table")), told[number].values.numpy()
        )
        return number

    found = [number_of(one / "saved") for one in taken.folders]
    assert found == sorted(found) and {*found} == {0, 1}
    # The disk has all files before the index is renamed.
    names = [name for name, _ in taken.calls]
    assert names[-1 - names[::-1].index("replace") - 1] == "fsync"
    assert names[0] == "fsync"
    # A new save replaces this one, and what a killed process has left.
    left = taken.folders[len(found) // 2]
    for folder in (path.parent, left):
        tf.train.Checkpoint(table=told[0].table, other=tf.Variable(0.0)).write(
            folder / "saved"
        )
        assert number_of(folder / "saved") == 0
        files = {one.name for one in folder.iterdir()}
        assert len({name[-5:] for name in files}) == 2, files


def test_what_saves_otherwise_is_given_the_whole_table():
    told = Told()
    saveable = told.table._gather_saveables_for_checkpoint()["VARIABLE_VALUE"](
        "key"
    )
    np.testing.assert_array_equal(
        saveable.specs[0].tensor.numpy(), told.values.numpy()
    )
