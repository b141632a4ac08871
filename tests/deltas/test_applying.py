"""Tests the errors and the crash safety of `tlm.deltas.apply`."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.deltas import cases
from tests.files import full_disk, snapshots

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Writes two base checkpoints, and three deltas for each base."""
    where = tmp_path_factory.mktemp("written")
    for name in ("one", "two"):
        one = cases.embedding()
        cases.train(one, 100 if name == "two" else 99)
        base = cases.save(one, where / name)
        writer = tlm.deltas.DeltaWriter(
            one, where / f"{name}_deltas", base=base
        )
        for step in range(3):
            cases.train(one, step)
            writer.write()
    return where


def data_of(directory, number):
    return directory / number / "delta.data-00000-of-00001"


def truncate_data(directory, _):
    file = data_of(directory, "00000002")
    file.write_bytes(file.read_bytes()[:-1])


def modify_data(directory, _):
    file = data_of(directory, "00000002")
    found = bytearray(file.read_bytes())
    found[len(found) // 2] ^= 1
    file.write_bytes(found)


def modify_meta(directory, _):
    file = directory / "00000003" / "meta.json"
    found = json.loads(file.read_text())
    found["tables"]["words"]["to_step"] += 1
    file.write_text(json.dumps(found))


def truncate_meta(directory, _):
    file = directory / "00000001" / "meta.json"
    file.write_text(file.read_text()[:40])


def unknown_format(directory, _):
    file = directory / "00000001" / "meta.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 5'))


def remove_meta(directory, _):
    (directory / "00000003" / "meta.json").unlink()


def remove_data(directory, _):
    data_of(directory, "00000003").unlink()


def remove_second(directory, _):
    shutil.rmtree(directory / "00000002")


def remove_first(directory, _):
    shutil.rmtree(directory / "00000001")


def repeat_second(directory, _):
    shutil.copytree(directory / "00000002", directory / "00000004")


def foreign_base(directory, other):
    for path in sorted(directory.iterdir()):
        shutil.rmtree(path)
    shutil.copytree(other / "00000001", directory / "00000001")


def foreign_delta(directory, other):
    # The replacing delta has the same base checkpoint, but a different
    # preceding delta.
    shutil.rmtree(directory / "00000003")
    shutil.copytree(other / "00000003", directory / "00000003")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            truncate_data,
            "00000002/delta.data.*must have .* bytes.*truncated or modified",
        ),
        (
            modify_data,
            "00000002/delta.data.*the checksum.*the file was modified",
        ),
        (modify_meta, "00000003/meta.json.*modified file, whose seal does not"),
        (truncate_meta, "00000001/meta.json.*a truncated or modified file"),
        (unknown_format, "must be of format 1.*Received: format 5"),
        (
            remove_meta,
            "00000003' must hold 'meta.json'. Received: .*No such file",
        ),
        (
            remove_data,
            "Delta 3 must have the file .*delta.data.*Received: none",
        ),
        (remove_second, "consecutive numbers. Received: delta 3 after 1"),
        (remove_first, "consecutive numbers. Received: delta 2 after 0"),
        (repeat_second, "00000004' must hold delta 4. Received: delta 2 again"),
        (
            foreign_base,
            "Delta 1 must be of base .*one-1'. Received: a delta of ano",
        ),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_incomplete_or_modified_deltas_raise(
    change, message, written, tmp_path
):
    directory = tmp_path / "deltas"
    shutil.copytree(written / "one_deltas", directory)
    change(directory, written / "two_deltas")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=message):
        tlm.deltas.apply(written / "one-1", directory, tmp_path / "full")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_delta_with_another_predecessor_raises(written, tmp_path):
    one = cases.embedding()
    cases.train(one, 99)
    writer = tlm.deltas.DeltaWriter(
        one, tmp_path / "other", base=written / "one-1"
    )
    for _ in range(3):
        writer.write()
    directory = tmp_path / "deltas"
    shutil.copytree(written / "one_deltas", directory)
    foreign_delta(directory, tmp_path / "other")
    with pytest.raises(
        ValueError, match=("Delta 3 must follow delta 2 of its directory")
    ):
        tlm.deltas.apply(written / "one-1", directory)
    with pytest.raises(ValueError, match="Delta 3 must follow delta 2"):
        tlm.deltas.DeltaWriter(one, directory, base=written / "one-1")


def test_invalid_paths_raise(written, tmp_path):
    with pytest.raises(ValueError, match="must be a directory with deltas"):
        tlm.deltas.apply(written / "one-1", tmp_path / "nothing")
    with pytest.raises(ValueError, match="must be the prefix of a checkpoint"):
        tlm.deltas.apply(tmp_path / "nothing", written / "one_deltas")
    with pytest.raises(ValueError, match="a prefix that differs from `base`"):
        tlm.deltas.apply(
            written / "one-1", written / "one_deltas", written / "one-1"
        )
    # Without deltas, the result equals the base checkpoint.
    assert cases.tensors(
        tlm.deltas.apply(written / "one-1", tmp_path)
    ) == cases.tensors(str(written / "one-1"))


def test_a_modified_base_raises(written, tmp_path):
    for path in written.glob("one-1.*"):
        shutil.copy(path, tmp_path)
    data = tmp_path / "one-1.data-00000-of-00001"
    found = bytearray(data.read_bytes())
    found[len(found) // 2] ^= 1
    for contents in (found, found[:100]):
        data.write_bytes(contents)
        with pytest.raises(ValueError, match="from the base failed"):
            tlm.deltas.apply(
                tmp_path / "one-1", written / "one_deltas", tmp_path / "full"
            )
    assert not list(tmp_path.glob("full*"))


def test_base_and_deltas_are_not_overwritten_through_links(
    written, tmp_path, monkeypatch
):
    for path in written.glob("one-1.*"):
        shutil.copy(path, tmp_path)
    shutil.copytree(written / "one_deltas", tmp_path / "deltas")
    (tmp_path / "folder").symlink_to(tmp_path)
    for path in list(tmp_path.glob("one-1.*")):
        (tmp_path / path.name.replace("one", "soft")).symlink_to(path)
        os.link(path, tmp_path / path.name.replace("one", "hard"))
    monkeypatch.chdir(tmp_path)
    before = cases.tensors("one-1")
    for target in (
        "./one-1",
        "one-1/",
        "folder/one-1",
        "soft-1",
        "hard-1",
        f"file://{tmp_path}/one-1",
    ):
        with pytest.raises(
            ValueError, match="a prefix that differs from `base`"
        ):
            tlm.deltas.apply("one-1", "deltas", target)
    with pytest.raises(ValueError, match="from all deltas.*00000002"):
        tlm.deltas.apply("one-1", "deltas", "folder/deltas/00000002/delta")
    assert cases.tensors("one-1") == before
    # A path to the same folder with more slashes or with links names the same
    # checkpoint.
    found = cases.tensors(
        tlm.deltas.apply("folder/one-1", "folder/deltas/", "folder/full")
    )
    assert found == cases.tensors(
        tlm.deltas.apply(written / "one-1", written / "one_deltas", "other")
    )


@pytest.fixture
def replaced(written, tmp_path):
    """Returns a checkpoint, a function to replace it, old and new contents."""
    folder = tmp_path / "all"
    target, other = folder / "full", tmp_path / "other"
    tlm.deltas.apply(written / "one-1", written / "one_deltas", other)
    # The old checkpoint is an earlier state with the same number of tensors.
    shutil.copytree(written / "one_deltas", tmp_path / "one_delta")
    for name in ("00000002", "00000003"):
        shutil.rmtree(tmp_path / "one_delta" / name)
    tlm.deltas.apply(written / "one-1", tmp_path / "one_delta", target)

    def replace(target):
        return tlm.deltas.apply(
            written / "one-1", written / "one_deltas", target
        )

    old, new = cases.tensors(str(target)), cases.tensors(str(other))
    assert old != new
    return target, replace, old, new


def test_one_checkpoint_is_complete_after_any_file_operation(
    replaced, tmp_path, monkeypatch
):
    target, replace, old, new = replaced
    recorded = snapshots.Snapshots(target.parent, tmp_path / "copies")
    with recorded.of_operations(monkeypatch):
        replace(target)
    found = [cases.tensors(str(one / "full")) for one in recorded.folders]
    is_new = [one == new for one in found]
    assert all(one in (old, new) for one in found)
    assert is_new == sorted(is_new) and not is_new[0] and is_new[-1]
    # Each file is synced before it is renamed. The data file is also synced
    # before the index file is renamed.
    synced, renamed = set(), []
    for name, argument in recorded.calls:
        if name == "fsync":
            synced.add(len(renamed))
        elif name == "replace":
            renamed.append(str(argument))
    assert len(renamed) > 5 and renamed[-1].endswith(".index")
    assert {0, len(renamed) - 1, len(renamed)} <= synced
    # The next writer removes the files that a killed writer left behind.
    for one in recorded.folders[::9]:
        replace(one / "full")
        assert cases.tensors(str(one / "full")) == new
        files = {path.name for path in one.iterdir()}
        assert "full.index" in files
        assert len({name[-5:] for name in files}) == 2, files


# Starts a process with TensorFlow, and kills many copies of the process.
@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_killed_process_leaves_one_complete_checkpoint(
    replaced, written, tmp_path
):
    target, _, old, new = replaced
    program = subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "tests/deltas/killed_apply.py"),
            str(written / "one-1"),
            str(written / "one_deltas"),
            str(target),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    timer = threading.Timer(300, program.kill)
    timer.start()
    before = [(path, path.read_bytes()) for path in target.parent.iterdir()]
    found = []
    try:
        for count in range(2, 500, 5):
            program.stdin.write(f"{count}\n")
            program.stdin.flush()
            line = program.stdout.readline()
            now = cases.tensors(str(target))
            assert now in (old, new)
            found.append(now == new)
            if line == "done\n":
                break
            assert line == "killed\n"
            # The next process starts with the files that remain and with the
            # old checkpoint.
            if now == new:
                for path in target.parent.glob("full.*"):
                    if path.is_file():
                        path.unlink()
                for path, contents in before:
                    path.write_bytes(contents)
    finally:
        timer.cancel()
        program.stdin.close()
        program.kill()
        program.wait(60)
        program.stdout.close()
    assert line == "done\n" and len(found) > 12
    assert found == sorted(found) and found[-1] and not found[0]
    assert not list(target.parent.glob("*partial*"))


def test_a_full_disk_leaves_the_old_checkpoint(replaced):
    target, replace, old, new = replaced
    before = sorted(target.parent.iterdir())
    with pytest.raises(OSError, match="File too large.*full"):
        with full_disk.full_disk():
            replace(target)
    assert sorted(target.parent.iterdir()) == before
    assert cases.tensors(str(target)) == old
    replace(target)
    assert cases.tensors(str(target)) == new


def test_target_below_a_file_raises_and_slashes_are_dropped(written, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        tlm.deltas.apply(
            written / "one-1",
            written / "one_deltas",
            tmp_path / "file" / "full",
        )
    # A trailing slash is ignored.
    found = tlm.deltas.apply(
        f"{written}/one-1/", written / "one_deltas", f"{tmp_path}/new/1/"
    )
    assert found == f"{tmp_path}/new/1"
    one = cases.embedding()
    tf.train.Checkpoint(embedding=one).restore(
        found
    ).assert_existing_objects_matched()
