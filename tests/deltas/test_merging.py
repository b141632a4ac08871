"""Tests `tlm.deltas.merge` and `tlm.deltas.prune`."""

import json
import os
import shutil

import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.deltas import cases
from tests.files import snapshots
from tf_layoutmap.deltas import merging

NUM_DELTAS = 5


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Returns a folder with a base, its deltas, and full checkpoints.

    The open table of `cases` has a sketch, evicted keys and expired keys.
    """
    where = tmp_path_factory.mktemp("written")
    one = cases.embedding(num_shards=2)
    for step in range(3):
        cases.train(one, step)
    base = cases.save(one, where / "base")
    writer = tlm.deltas.DeltaWriter(one, where / "deltas", base=base)
    for number in range(1, NUM_DELTAS + 1):
        for step in range(3):
            cases.train(one, number * 3 + step)
        one.vocabularies["words"].evict(one.vocabularies["words"].keys()[::9])
        writer.write()
        cases.save(one, where / f"full_{number}")
    return where


@pytest.fixture
def deltas(written, tmp_path):
    """Returns a copy of the directory of the deltas."""
    shutil.copytree(written / "deltas", tmp_path / "deltas")
    return tmp_path / "deltas"


def assert_full(written, deltas, number=NUM_DELTAS):
    """Asserts that the deltas lead to the full checkpoint of a delta."""
    found = tlm.deltas.apply(written / "base-1", deltas, deltas.parent / "full")
    wanted = cases.tensors(str(written / f"full_{number}-1"))
    assert cases.tensors(found) == wanted


def paths(deltas, *numbers):
    return [deltas / f"{number:08d}" for number in numbers]


@pytest.mark.parametrize(("first", "last"), [(1, 5), (1, 2), (2, 4), (5, 5)])
def test_a_merged_delta_replaces_its_deltas(
    first, last, written, deltas, tmp_path
):
    merged = tlm.deltas.merge(
        paths(deltas, *range(first, last + 1)),
        deltas / f"{first:08d}-{last:08d}",
    )
    assert (merged.meta.first, merged.meta.sequence) == (first, last)
    for path in paths(deltas, *range(first, last + 1)):
        shutil.rmtree(path)
    assert_full(written, deltas)


def test_merging_in_two_steps_gives_the_same_delta(deltas, tmp_path):
    tlm.deltas.merge(paths(deltas, 1, 2, 3), tmp_path / "first")
    two = tlm.deltas.merge(
        [tmp_path / "first", *paths(deltas, 4, 5)], tmp_path / "two"
    )
    one = tlm.deltas.merge(paths(deltas, 1, 2, 3, 4, 5), tmp_path / "one")
    assert two.meta == one.meta
    # Each row is stored once.
    for table, counts in one.meta.tables.items():
        assert counts["num_rows"] == len(
            tf.train.load_checkpoint(one.tensors).get_tensor(f"{table}/rows")
        )
        assert counts["num_rows"] < sum(
            json.loads((path / "meta.json").read_text())["tables"][table][
                "num_rows"
            ]
            for path in paths(deltas, 1, 2, 3, 4, 5)
        )


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((1, 3), "consecutive numbers. Received: delta 3 after 1"),
        ((1, 2, 2), "follows delta 2. Received: delta 2, which was already"),
        ((2, 1), "follows delta 2. Received: delta 1, which was already"),
    ],
)
def test_deltas_that_do_not_follow_each_other_raise(
    numbers, message, deltas, tmp_path
):
    with pytest.raises(ValueError, match=message):
        tlm.deltas.merge(paths(deltas, *numbers), tmp_path / "out")
    assert os.listdir(tmp_path) == ["deltas"]


def test_invalid_arguments_raise(deltas, tmp_path):
    with pytest.raises(TypeError, match="`paths` must be a list of paths"):
        tlm.deltas.merge(deltas, tmp_path / "out")
    with pytest.raises(ValueError, match="list with at least one delta"):
        tlm.deltas.merge([], tmp_path / "out")
    with pytest.raises(FileExistsError):
        tlm.deltas.merge(paths(deltas, 1, 2), deltas / "00000002")
    with pytest.raises(ValueError, match="`keep` must be at least 0"):
        tlm.deltas.prune(deltas, keep=-1)
    with pytest.raises(ValueError, match="must be a directory with deltas"):
        tlm.deltas.prune(tmp_path / "none", keep=1)


def test_a_damaged_delta_raises_and_nothing_is_removed(deltas, tmp_path):
    (data,) = (deltas / "00000002").glob("delta.data*")
    data.write_bytes(data.read_bytes()[:-1])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="00000002/delta.data.*truncated"):
        tlm.deltas.merge(paths(deltas, 1, 2), tmp_path / "out")
    with pytest.raises(ValueError, match="00000002/delta.data.*truncated"):
        tlm.deltas.prune(deltas, keep=1)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("keep", "names"),
    [
        (0, ["00000001-00000005"]),
        (2, ["00000001-00000003", "00000004", "00000005"]),
        (4, [f"{number:08d}" for number in range(1, 6)]),
        (9, [f"{number:08d}" for number in range(1, 6)]),
    ],
)
def test_pruning_keeps_the_last_deltas(keep, names, written, deltas):
    found = tlm.deltas.prune(deltas, keep=keep)
    assert [os.path.basename(one.path) for one in found] == names
    assert sorted(os.listdir(deltas)) == names
    assert_full(written, deltas)
    # The next call merges the merged delta again.
    if keep == 2:
        tlm.deltas.prune(deltas, keep=1)
        assert sorted(os.listdir(deltas)) == ["00000001-00000004", "00000005"]
        assert_full(written, deltas)


def test_a_writer_continues_a_pruned_directory(tmp_path):
    one = cases.embedding()
    base = cases.save(one, tmp_path / "base")
    writer = tlm.deltas.DeltaWriter(one, tmp_path / "deltas", base=base)
    for step in range(3):
        cases.train(one, step)
        writer.write()
    tlm.deltas.prune(tmp_path / "deltas", keep=1)
    cases.train(one, 3)
    writer.write()
    # The comparison reads the merged delta.
    cases.train(one, 4)
    writer.write(compare=True)
    restarted = tlm.deltas.DeltaWriter(one, tmp_path / "deltas", base=base)
    cases.train(one, 5)
    assert restarted.write().meta.sequence == 6
    tlm.deltas.prune(tmp_path / "deltas", keep=2)
    assert sorted(os.listdir(tmp_path / "deltas")) == [
        "00000001-00000004",
        "00000005",
        "00000006",
    ]
    full = tlm.deltas.apply(base, tmp_path / "deltas", tmp_path / "full")
    wanted = cases.save(one, tmp_path / "wanted")
    assert cases.tensors(full) == cases.tensors(wanted)


def test_all_changes_exist_whenever_the_process_is_killed(
    written, deltas, tmp_path, monkeypatch
):
    copies = snapshots.Snapshots(deltas, tmp_path / "copies")
    with copies.of_operations(monkeypatch):
        tlm.deltas.prune(deltas, keep=1)
    # Several operations leave the same files behind.
    by_names = {
        tuple(sorted(one.relative_to(folder) for one in folder.rglob("*"))): (
            folder
        )
        for folder in copies.folders
    }
    assert len(by_names) > 4
    for number, folder in enumerate(by_names.values()):
        deltas = tmp_path / f"at_{number}" / "deltas"
        shutil.copytree(folder, deltas)
        assert_full(written, deltas)
        # The next call removes what the killed process left behind.
        tlm.deltas.prune(deltas, keep=1)
        assert sorted(os.listdir(deltas)) == ["00000001-00000004", "00000005"]


def test_a_delta_with_other_tables_raises(deltas, monkeypatch, tmp_path):
    found = merging.chain.read_chain(
        [str(path) for path in paths(deltas, 1, 2)], "", "the base"
    )
    found[1].meta.tables.pop("kinds")
    with pytest.raises(ValueError, match="same tables.*00000002"):
        merging._write_merged(found, str(tmp_path / "out"))
