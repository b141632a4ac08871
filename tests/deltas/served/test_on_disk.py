"""Tests `update_export`: a copy on disk is equal to a new export."""

import os
import shutil

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.deltas.served import cases
from tests.files import full_disk
from tf_layoutmap._core import tf_private
from tf_layoutmap.serving import sources


@pytest.fixture(scope="module", params=["float32", "int4"])
def written(request, tmp_path_factory):
    """Returns a folder with an export in several blocks and three deltas."""
    where = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sources, "BLOCK_BYTES", 17 * 4 * cases.DIM)
        one = cases.embedding(num_shards=3)
        for step in range(3):
            cases.train(one, step)
        _, writer = cases.base_and_writer(one, where)
        cases.export(one, where / "model", request.param, delta_writer=writer)
        for step in range(3, 6):
            cases.train(one, step)
            writer.write()
            cases.export(one, where / f"fresh_{step - 2}", request.param)
    return where


def test_a_copy_equals_a_new_export(written, tmp_path):
    deltas, last = written / "deltas", written / "model"
    # Each copy is the source of the next copy.
    for number in (1, 2, 3):
        target = tmp_path / "models" / str(number)
        paths = [deltas / f"{number:08d}"]
        assert tlm.deltas.update_export(last, paths, target) == number
        fresh = written / f"fresh_{number}"
        assert cases.stored(target) == cases.stored(fresh)
        assert (target / "saved_model.pb").stat().st_size == (
            last / "saved_model.pb"
        ).stat().st_size
        last = target
    assert (
        tlm.deltas.update_export(written / "model", deltas, tmp_path / "all")
        == 3
    )
    assert cases.stored(tmp_path / "all") == cases.stored(last)
    # Without pending deltas, the copy is equal to its source.
    assert tlm.deltas.update_export(last, deltas, tmp_path / "copy") == 3
    assert cases.stored(tmp_path / "copy") == cases.stored(last)
    served = tf.saved_model.load(str(last))
    fresh = tf.saved_model.load(str(written / "fresh_3"))
    wanted = fresh.serve(cases.inputs())
    for name, value in served.serve(cases.inputs()).items():
        np.testing.assert_array_equal(value, wanted[name])


@pytest.mark.exhaustive
def test_the_fingerprint_belongs_to_the_copy(written, tmp_path):
    tlm.deltas.update_export(
        written / "model", written / "deltas", tmp_path / "new"
    )
    read = tf.saved_model.experimental.read_fingerprint
    found = read(str(tmp_path / "new"))
    before = read(str(written / "model"))
    assert found.checkpoint_hash != before.checkpoint_hash
    # TensorFlow computes the same hashes.
    tf_private.write_fingerprint(str(tmp_path / "new"))
    wanted = read(str(tmp_path / "new"))
    assert found.singleprint() == wanted.singleprint()


@pytest.mark.covering(1, 1)
def test_a_served_model_continues_from_a_copy(written, tmp_path):
    deltas = written / "deltas"
    tlm.deltas.update_export(
        written / "model", [deltas / "00000001"], tmp_path / "new"
    )
    served = tlm.deltas.ServedModel(tmp_path / "new")
    assert served.sequence == 1
    assert served.apply(deltas) == 3
    cases.assert_same_tables(
        cases.in_memory(served.model), cases.stored(written / "fresh_3")
    )
    with pytest.raises(ValueError, match="delta 1, which was already applied"):
        tlm.deltas.update_export(
            tmp_path / "new", [deltas / "00000001"], tmp_path / "again"
        )
    assert os.listdir(tmp_path) == ["new"]


@pytest.mark.covering(1, 1)
def test_an_existing_target_raises(written, tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "letter.txt").write_text("dear")
    with pytest.raises(FileExistsError, match="`target` must be a folder that"):
        tlm.deltas.update_export(
            written / "model", written / "deltas", tmp_path / "letters"
        )
    assert os.listdir(tmp_path / "letters") == ["letter.txt"]
    (tmp_path / "empty").mkdir()
    tlm.deltas.update_export(
        written / "model", written / "deltas", tmp_path / "empty"
    )
    assert (tmp_path / "empty" / "saved_model.pb").exists()


def test_a_damaged_model_raises_and_writes_nothing(written, tmp_path):
    shutil.copytree(written / "model", tmp_path / "model")
    found = sorted((tmp_path / "model" / "variables").glob("*.data*"))
    largest = max(found, key=lambda one: one.stat().st_size)
    values = bytearray(largest.read_bytes())
    values[len(values) // 2] ^= 1
    largest.write_bytes(values)
    with pytest.raises(ValueError, match="truncated or modified"):
        tlm.deltas.update_export(
            tmp_path / "model", written / "deltas", tmp_path / "new"
        )
    assert os.listdir(tmp_path) == ["model"]


def test_a_full_disk_raises_and_leaves_no_files(written, tmp_path):
    with pytest.raises(OSError, match="File too large"):
        with full_disk.full_disk():
            tlm.deltas.update_export(
                written / "model", written / "deltas", tmp_path / "new"
            )
    assert not os.listdir(tmp_path)


def test_the_next_call_removes_the_files_of_a_killed_process(written, tmp_path):
    left = tmp_path / f"new.partial-{'0' * 16}"
    left.mkdir()
    (left / "part").write_text("")
    other = tmp_path / f"newer.partial-{'0' * 16}"
    other.mkdir()
    tlm.deltas.update_export(
        written / "model", written / "deltas", tmp_path / "new"
    )
    assert sorted(os.listdir(tmp_path)) == ["new", other.name]


def test_the_copy_of_a_read_only_export_is_writable(written, tmp_path):
    """The folders of images of containers are often read-only."""
    source = tmp_path / "source"
    shutil.copytree(written / "model", source)
    everything = [source, *source.rglob("*")]
    for path in everything:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert tlm.deltas.update_export(
            source, written / "deltas", tmp_path / "new"
        )
    finally:
        for path in everything:
            path.chmod(0o755)
    assert cases.stored(tmp_path / "new") == cases.stored(written / "fresh_3")
    assert all(
        path.stat().st_mode & 0o200 for path in (tmp_path / "new").rglob("*")
    )
    assert [
        path.name for path in tmp_path.iterdir() if "partial" in path.name
    ] == []
